"""Adapters of peft (LoRA, arXiv 2106.09685) on layers that are split.

The layer computes y = W x + s B A D(x), where D is dropout. An adapter's matrix is split as W is,
by output (as a column layer) or by input (as a row layer). Communication for an adapter therefore
involves only its r features::

    layer                A (r, i)         B (o, r)          input of D
    column               whole (1)        split by output   the same on all ranks
    row                  split by input   whole             this rank's features
    vocabulary (a head)  whole            split by token    the same on all ranks
    embedding            whole            whole             -

(1) Inside a region its gradient is partial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_ptdp.shims.peft import adapters_of, replaced_by
from lightning_ptdp.tensor_parallel.kinds import (
    Column,
    Kind,
    ModulePlace,
    Position,
    Row,
    Vocabulary,
)
from lightning_ptdp.tensor_parallel.kinds.linear_kinds import is_linear
from lightning_ptdp.tensor_parallel.randomness import PlacedDropout


@dataclass(frozen=True, kw_only=True)
class ReplicatedMatrix(Kind):
    """A matrix of an adapter that every rank holds whole.

    Attributes:
        before: True if its output is the input of a column layer. Inside of a region, every rank's
            gradient is then a part of the sum.
    """

    before: bool

    region_part = True

    def partial(self, place: ModulePlace) -> tuple[str, ...]:
        return ("tensor",) if self.before and not place.enters else super().partial(place)


@dataclass(frozen=True, kw_only=True)
class Dropped(Kind):
    """The dropout before an adapter.

    On a column layer all ranks draw the same mask. On a row layer each rank draws its own.

    Attributes:
        split: True if its input is split by features.
    """

    split: bool

    parameters = None

    def build(
        self, module: nn.Module, local: Mapping[str, nn.Parameter], place: ModulePlace
    ) -> nn.Module:
        if not isinstance(module, nn.Dropout):
            return module
        return PlacedDropout(
            module.p, split=self.split or (place.sequence_parallel and place.enters)
        )


def adapter_kinds(name: str, module: nn.Module, kind: Kind) -> Iterator[tuple[str, Kind]]:
    """Yield the kinds of the adapters' parts in peft's layer ``name``.

    ``kind`` is the kind of the module that the layer wraps.
    """
    parts = {
        Column: (ReplicatedMatrix(before=True), kind),
        Row: (kind, ReplicatedMatrix(before=False)),
        Vocabulary: (ReplicatedMatrix(before=False), kind),
    }.get(type(kind))
    is_product = is_linear(module.get_submodule(replaced_by(module) or ""))
    for adapter in adapters_of(module) or () if parts is not None and is_product else ():
        assert parts is not None
        yield f"{name}.lora_dropout.{adapter}", Dropped(split=isinstance(kind, Row))
        yield f"{name}.lora_A.{adapter}", parts[0]
        yield f"{name}.lora_B.{adapter}", parts[1]


def check_adapters(model: nn.Module, kinds: Mapping[str, Kind]) -> None:
    """Check that the adapters of peft on modules of these kinds can be split.

    Raises:
        ValueError: An adapter cannot be split.
    """
    for name, module in model.named_modules():
        # A prompt's configuration is private.
        configs = vars(module).get("peft_config") or vars(module).get("_peft_config")
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


def _refuse(problem: str, *, axis: str = "tensor") -> None:
    raise ValueError(
        f"{problem}, which {axis}_parallel_size > 1 cannot split. Use plain LoRA on linear "
        f"layers, or {axis}_parallel_size=1"
    )
