"""Low-rank adapters (LoRA, arXiv 2106.09685), inserted by peft into Hugging Face models.

All other weights of the model are frozen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import nn

from lightning_ptdp.base.option_types import Size, check_types
from lightning_ptdp.base.requirements import import_optional
from lightning_ptdp.tensor_parallel.named_modules import nearest_names

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Adapters that are trained in addition to the frozen weights W of a model.

    The output is that of W + alpha / r B A, with B (o, r) and A (r, i).

    Args:
        r: Rank of the adapters.
        alpha: Scale of the adapters, times r.
        dropout: Dropout of the input of the adapters.
        target_modules: Names of the modules that get an adapter (``q_proj``), or a regular
            expression of whole names. "all-linear": all linear layers but the head.
        modules_to_save: Names of modules that are trained as a whole, and saved with the adapters.
        bias: Biases to train: "none", "all", or those of the target modules, "lora_only".
        use_rslora: Use the scale alpha / sqrt(r) (arXiv 2312.03732).
        use_dora: Train an additional magnitude for each output (DoRA, arXiv 2402.09353). Not
            available under tensor parallelism.
        init: Initial values of A: those of an ``nn.Linear`` ("default") or "gaussian". B starts at
            zero.

    Raises:
        ValueError: A value is out of range; the message names the field.
    """

    r: Size = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] | str = ALL_LINEAR
    modules_to_save: tuple[str, ...] = ()
    bias: Literal["none", "all", "lora_only"] = "none"
    use_rslora: bool = False
    use_dora: bool = False
    init: Literal["default", "gaussian"] = "default"

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and less than 1")
        if self.alpha <= 0:
            raise ValueError(f"alpha={self.alpha} must be positive")

    def config(self, **more: Any) -> Any:
        """Return these options as peft's ``LoraConfig``, with ``more`` as further arguments."""
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
        """Check that every name matches a module.

        Raises:
            ValueError: A name matches none. The message gives the nearest names.
        """
        names = [name for name, _ in model.named_modules() if name]
        targets = self.target_modules
        patterns = {}
        if not isinstance(targets, str):
            patterns = {target: rf"(.*\.)?{re.escape(target)}" for target in targets}
        elif targets != ALL_LINEAR:
            patterns = {targets: targets}
        wanted = [("target_modules", *each) for each in patterns.items()]
        wanted += [("modules_to_save", end, f".*{re.escape(end)}") for end in self.modules_to_save]
        for field, target, pattern in wanted:
            if any(re.fullmatch(pattern, name) for name in names):
                continue
            short_names = dict.fromkeys(name.rpartition(".")[2] for name in names)
            near = nearest_names(target, [name for name in short_names if not name.isdigit()])
            raise ValueError(
                f"adapter.{field}: {target!r} is not a module of {type(model).__name__}; {near}"
            )

    def inject(self, model: nn.Module, **more: Any) -> nn.Module:
        """Insert the adapters into ``model``, in place, and freeze all other parameters.

        Adapters are float32 if the model is in half precision, as in peft. Biases and whole modules
        keep their type, in which the model computes with them.

        Raises:
            ValueError: As for ``check``.
        """
        peft = import_optional("peft")

        self.check(model)
        peft.inject_adapter_in_model(self.config(**more), model)
        for name, parameter in model.named_parameters():
            if ".lora_" in name and parameter.dtype.itemsize == 2:
                parameter.data = parameter.data.float()
        return model


def as_lora(value: LoraOptions | Mapping[str, Any] | None) -> LoraOptions | None:
    """Return the options, also from the dictionary in a checkpoint.

    Raises:
        ValueError: The dictionary has an unknown key.
    """
    if not isinstance(value, Mapping):
        return value
    options = [field.name for field in fields(LoraOptions)]
    for name in value.keys() - set(options):
        raise ValueError(f"adapter has no option {name!r}; {nearest_names(name, options)}")
    return LoraOptions(**value)
