"""Messages held back until the command line has been checked."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_ptdp.cli.error_messages import explain

__all__ = ["held_back"]

_LOGGERS = (None, "lightning", "lightning.fabric", "lightning.pytorch")

_Held = list[tuple[logging.Handler, logging.LogRecord]]


@contextmanager
def held_back() -> Iterator[None]:
    """Hold back Lightning's messages while a run is built and checked.

    The messages are printed afterwards. They are dropped if the run is refused, because they would
    hide the error message.
    """
    held: _Held = []
    handlers = {
        handler: functools.partial(_keep, held, handler)
        for name in _LOGGERS
        for handler in logging.getLogger(name).handlers
    }
    for handler, keep in handlers.items():
        handler.addFilter(keep)
    try:
        yield
    except Exception as error:
        if explain(error) is not None:
            held.clear()
        raise
    finally:
        for handler, keep in handlers.items():
            handler.removeFilter(keep)
        for handler, record in held:
            handler.handle(record)


def _keep(held: _Held, handler: logging.Handler, record: logging.LogRecord) -> bool:
    if record.levelno > logging.INFO:
        return True
    held.append((handler, record))
    return False
