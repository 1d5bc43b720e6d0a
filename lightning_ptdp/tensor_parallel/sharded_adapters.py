"""Adapters of peft (LoRA, arXiv 2106.09685) beside layers that are split: y = W x + s B A D(x), D
being dropout.

What is beside a split matrix is split as it is, so that nothing but r features ever travels for an
adapter::

    beside                A (r, i)                                   B (o, r)                     D sees
    column                whole; in a region its gradient is partial split by output, as W is     what all members have
    row                   split by input, as W is                    whole                        a member's features
    vocabulary (a head)   whole                                      split by token               what all members have
    embedding             whole                                      whole                        -
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_ptdp.parameters.sharding import Sharding
from lightning_ptdp.shims.peft import adapters_of, replaced_by
from lightning_ptdp.tensor_parallel.kinds import Column, Kind, Place, Position, Row, Vocabulary
from lightning_ptdp.tensor_parallel.linear_like import is_linear
from lightning_ptdp.tensor_parallel.randomness import PlacedDropout

__all__ = ["adapter_kinds", "check_adapters"]


@dataclass(frozen=True, kw_only=True)
class Beside(Kind):
    """A matrix of an adapter that every rank has whole.

    Attributes:
        before: Whether its output goes into a column layer: inside of a region every rank's
            gradient of it is a part of the sum.
    """

    before: bool

    region_part = True

    def shardings(self, module: nn.Module, place: Place) -> dict[str, Sharding]:
        partial = ("tensor",) if self.before and not place.enters else place.partial
        return {
            name: Sharding.replicated(p.shape, partial=partial)
            for name, p in module.named_parameters()
        }


@dataclass(frozen=True, kw_only=True)
class Dropped(Kind):
    """The dropout in front of an adapter: behind a column layer all members draw the same, in front
    of a row layer each its own.

    Attributes:
        split: Whether its input is split by features.
    """

    split: bool

    parameters = None

    def build(
        self, module: nn.Module, local: Mapping[str, nn.Parameter], place: Place
    ) -> nn.Module:
        if not isinstance(module, nn.Dropout):
            return module
        return PlacedDropout(
            module.p, split=self.split or (place.sequence_parallel and place.enters)
        )


def adapter_kinds(name: str, module: nn.Module, kind: Kind) -> Iterator[tuple[str, Kind]]:
    """Yield the kinds for the parts of the adapters in peft's layer ``name`` around a module of
    this kind."""
    parts = {
        Column: (Beside(before=True), kind), Row: (kind, Beside(before=False)), Vocabulary: (Beside(before=False), kind),
    }.get(type(kind))  # fmt: skip
    is_product = is_linear(module.get_submodule(replaced_by(module) or ""))
    for adapter in adapters_of(module) or () if parts is not None and is_product else ():
        assert parts is not None
        yield f"{name}.lora_dropout.{adapter}", Dropped(split=isinstance(kind, Row))
        yield f"{name}.lora_A.{adapter}", parts[0]
        yield f"{name}.lora_B.{adapter}", parts[1]


def check_adapters(model: nn.Module, kinds: Mapping[str, Kind]) -> None:
    """Check that what peft put around modules of these kinds can be split.

    Raises:
        ValueError: It cannot.
    """
    for name, module in model.named_modules():
        configs = vars(module).get("peft_config")
        for key, config in configs.items() if isinstance(configs, dict) else ():
            if (kind := getattr(config.peft_type, "value", config.peft_type)) != "LORA":
                _refuse(f"the adapter '{key}' is {kind} of peft")
        kind = kinds.get(f"{name}.{replaced_by(module)}")
        if kind is None or hasattr(module, "modules_to_save"):
            continue
        if adapters_of(module) is None:
            _refuse(f"'{name}' is a {type(module).__name__} of peft")
        for key, variant in vars(module)["lora_variant"].items():
            _refuse(
                f"the adapter '{key}' of '{name}' is "
                f"{type(variant).__name__.removesuffix('Variant')} of peft (use_dora=True, or the "
                "like)"
            )
        base = module.get_submodule("base_layer")
        if not isinstance(kind, Column | Row | Vocabulary | Position) or (
            isinstance(kind, Column) and isinstance(base, nn.Embedding)
        ):
            _refuse(
                f"'{name}' has an adapter on a {type(base).__name__} that is sharded as {kind}",
                axis=kind.axis,
            )


def _refuse(what: str, *, axis: str = "tensor") -> None:
    raise ValueError(
        f"{what}, which {axis}_parallel_size > 1 cannot split; use plain LoRA on linear layers, "
        f"or {axis}_parallel_size=1"
    )
