"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft, put into a model of Hugging Face; its other
weights are frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import nn

from lightning_ptdp.base.option_types import Size, check_types
from lightning_ptdp.base.requirements import import_optional
from lightning_ptdp.tensor_parallel.patterns import nearest_names

__all__ = ["LoraOptions", "as_lora"]

_ALL = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Adapters that are trained beside a model's frozen weights W: W + alpha / r B A, B (o, r) and
    A (r, i).

    Args:
        r: Rank of the adapters.
        alpha: Their scale, times r.
        dropout: Of their input.
        target_modules: Names of the modules that get one (``q_proj``), or a regular expression of
            whole names; "all-linear": all linear layers but the head.
        modules_to_save: Names of modules that are trained whole, and saved with the adapters.
        bias: Whether biases are trained: "none", "all", or those of the target modules,
            "lora_only".
        use_rslora: The scale is alpha / sqrt(r) (arXiv 2312.03732).
        use_dora: A magnitude for each output is trained beside (DoRA, arXiv 2402.09353); not under
            tensor parallelism.
        init: Of A as an ``nn.Linear`` is ("default") or "gaussian"; B is zero.

    Raises:
        ValueError: A value out of range; the message names the field.
    """

    r: Size = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] | str = _ALL
    modules_to_save: tuple[str, ...] = ()
    bias: Literal["none", "all", "lora_only"] = "none"
    use_rslora: bool = False
    use_dora: bool = False
    init: Literal["default", "gaussian"] = "default"

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if self.alpha <= 0:
            raise ValueError(f"alpha={self.alpha} must be positive")

    def config(self, **more: Any) -> Any:
        """The same for peft; ``more`` are further arguments of its ``LoraConfig``."""
        peft = import_optional("peft")

        targets = self.target_modules
        return peft.LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            modules_to_save=list(self.modules_to_save) or None,
            bias=self.bias,
            use_rslora=self.use_rslora,
            use_dora=self.use_dora,
            init_lora_weights=True if self.init == "default" else self.init,
            **more,
        )

    def check(self, model: nn.Module) -> None:
        """Check that every name is one of a module.

        Raises:
            ValueError: One is not; nearest names are told.
        """
        names = [name for name, _ in model.named_modules() if name]
        if isinstance(self.target_modules, str):
            found = self.target_modules == _ALL or any(
                re.fullmatch(self.target_modules, name) for name in names
            )
            lost = [] if found else [("target_modules", self.target_modules)]
        else:
            lost = [
                ("target_modules", one) for one in self.target_modules if not _matches(one, names)
            ]
        lost += [
            ("modules_to_save", one)
            for one in self.modules_to_save
            if not any(name.endswith(one) for name in names)
        ]
        for field, one in lost:
            short = dict.fromkeys(name.rpartition(".")[2] for name in names)
            near = nearest_names(one, [name for name in short if not name.isdigit()])
            raise ValueError(
                f"adapter.{field}: {one!r} is no module of {type(model).__name__}; {near}"
            )

    def inject(self, model: nn.Module, **more: Any) -> nn.Module:
        """Put the adapters into ``model``, in place, and freeze everything else. Adapters are
        float32 where the model is in half precision, as peft has them.

        Raises:
            ValueError: Of ``check``.
        """
        peft = import_optional("peft")

        self.check(model)
        peft.inject_adapter_in_model(self.config(**more), model)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype.itemsize == 2:
                parameter.data = parameter.data.float()
        return model


def as_lora(value: LoraOptions | Mapping[str, Any] | None) -> LoraOptions | None:
    """Options, also from the dictionary that a checkpoint holds.

    Raises:
        ValueError: It has other names.
    """
    if not isinstance(value, Mapping):
        return value
    known = [field.name for field in fields(LoraOptions)]
    for name in value.keys() - set(known):
        raise ValueError(f"adapter has no option {name!r}; {nearest_names(name, known)}")
    return LoraOptions(**value)


def _matches(wanted: str, names: list[str]) -> bool:
    return any(name == wanted or name.endswith(f".{wanted}") for name in names)
