"""Signature of the strategy's constructor.

Its arguments are ``layout``, the fields of ``PTDPConfig``, which documents them, and the arguments
of Lightning's strategies."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, get_type_hints

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.shims.lightning import StrategyBase
from lightning_ptdp.strategy.layout_choice import LayoutChoice

__all__ = ["constructor"]


def constructor(
    construct: Callable[..., None], lightning: Callable[..., None]
) -> Callable[..., None]:
    """Return ``construct`` with the signature that ``inspect`` and jsonargparse read.

    ``lightning`` is the constructor of Lightning's class."""

    @wraps(construct)
    def init(self: StrategyBase, **options: Any) -> None:
        construct(self, **options)

    all_parameters = [
        Parameter("self", Parameter.POSITIONAL_OR_KEYWORD),
        Parameter("layout", Parameter.KEYWORD_ONLY, default=None, annotation=LayoutChoice | None),
    ]
    for source in (PTDPConfig.__init__, lightning):
        hints = get_type_hints(source)
        parameters = list(inspect.signature(source).parameters.values())[1:]
        all_parameters += [
            parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            for parameter in parameters
        ]
    init.__qualname__ = "PTDPStrategy.__init__"
    vars(init)["__signature__"] = Signature(all_parameters)
    return init
