"""The strategy's arguments: the fields of ``PTDPConfig``, which tells their meaning, and those of Lightning's own strategies."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any, get_type_hints

from lightning_ptdp._lightning import StrategyBase
from lightning_ptdp.config import PTDPConfig

__all__ = ["StrategyOptions", "constructor"]


class StrategyOptions(StrategyBase):
    """Mixin of the strategy: splits its arguments."""

    config: PTDPConfig

    def __init__(self, **options: Any) -> None:
        ours = {field.name: options.pop(field.name) for field in fields(PTDPConfig) if field.name in options}
        self.config = PTDPConfig(**ours)
        self._begin_empty()
        super().__init__(**options)

    def _begin_empty(self) -> None:
        """Set what a run will fill, before Lightning's own constructor looks at it."""


def constructor(lightning: Callable[..., None]) -> Callable[..., None]:
    """``__init__`` of a strategy, with the signature that ``inspect`` and jsonargparse read; ``lightning`` is that of Lightning's class."""

    def construct(self: StrategyOptions, **options: Any) -> None:
        StrategyOptions.__init__(self, **options)

    taken = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    for source in (PTDPConfig.__init__, lightning):
        hints = get_type_hints(source)
        parameters = list(inspect.signature(source).parameters.values())[1:]
        taken += [one.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[one.name]) for one in parameters]
    construct.__qualname__ = "PTDPStrategy.__init__"
    vars(construct)["__signature__"] = Signature(taken)
    return construct
