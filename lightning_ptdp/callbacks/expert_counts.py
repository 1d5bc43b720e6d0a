"""Numbers of tokens per expert, counted on the device and summed over the ranks on demand.

The counted values are the choices of experts with which the modules of experts are called. Ranks
that hold the same tokens count them again, and so does a recomputation. This applies equally to all
tokens of a layer, so that the *share* of an expert is right in every layout."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_ptdp.base.nested import iterate_tensors
from lightning_ptdp.tensor_parallel import Experts

_ROUNDING = 0.05
"""Largest deviation from 1 of the sum of probabilities in half precision."""


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """Load of the experts of one layer, over the tokens of all ranks.

    Attributes:
        name: Name of its module of experts.
        loads: Tokens of each expert over the mean of all experts.
        router_entropy: Mean over the tokens of the entropy of the router's probabilities, divided
            by the maximum entropy, that of equal probabilities; None if the scores were not seen.
    """

    name: str
    loads: tuple[float, ...]
    router_entropy: float | None

    @property
    def entropy(self) -> float:
        """Return the entropy of the loads over its maximum.

        It is 1 if all experts got the same, and 0 if one expert got everything."""
        shares = [load / len(self.loads) for load in self.loads if load]
        return -sum(share * math.log(share) for share in shares) / math.log(max(2, len(self.loads)))


def load_metrics(layers: Sequence[LayerLoad]) -> dict[str, float]:
    """Return the metrics of all layers that processed tokens; empty if no token was routed."""
    if not layers:
        return {}
    loads = [load for layer in layers for load in layer.loads]
    entropies = [layer.router_entropy for layer in layers if layer.router_entropy is not None]
    metrics = {
        "expert_load_max": max(loads),
        "expert_load_min": min(loads),
        "expert_load_entropy": sum(layer.entropy for layer in layers) / len(layers),
        "dead_experts": float(loads.count(0)),
    }
    return metrics | ({"router_entropy": sum(entropies) / len(entropies)} if entropies else {})


@dataclass(eq=False, kw_only=True)
class _Layer:
    """Counts of one local module of experts.

    Attributes:
        counts: (E,) float64, number of choices of each expert; a view into the table of all layers.
        entropy: (2,) float64, another view: sum of the entropies of the router's probabilities, and
            the number of tokens in it.
        scores: Last output before the experts that has the form of the router's scores, (..., E).
        scored_by: Sibling of the experts that made the scores, itself or by a module inside of it.
    """

    counts: Tensor
    entropy: Tensor
    scores: Tensor | None = None
    scored_by: nn.Module | None = None

    def attach(self, experts: nn.Module, siblings: Sequence[nn.Module]) -> list[RemovableHandle]:
        position = list(inspect.signature(type(experts).forward).parameters)[2]
        hooks = [
            experts.register_forward_pre_hook(partial(self._chosen, position), with_kwargs=True)
        ]
        hooks += [
            inner.register_forward_hook(partial(self._scored, sibling))
            for sibling in siblings
            for inner in sibling.modules()
        ]
        return hooks

    def _scored(
        self, sibling: nn.Module, module: nn.Module, args: tuple[Any, ...], output: object
    ) -> None:
        """Keep the scores among a sibling's output; they replace those of a module inside of it."""
        if module is not sibling and sibling is self.scored_by:
            return
        rows = (
            args[0].numel() // args[0].size(-1)
            if args and isinstance(args[0], Tensor) and args[0].numel()
            else None
        )
        for tensor in iterate_tensors(output):
            if (
                tensor.is_floating_point()
                and tensor.shape[-1:] == self.counts.shape
                and tensor.shape[:-1].numel() == rows
            ):
                self.scores = tensor.detach()
                self.scored_by = sibling
                return

    @torch.no_grad()
    def _chosen(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        index: Tensor = args[1] if len(args) > 1 else kwargs[name]
        chosen = index.reshape(-1).long()
        exists = (chosen >= 0) & (chosen < self.counts.numel())
        self.counts.scatter_add_(0, torch.where(exists, chosen, 0), exists.to(self.counts.dtype))
        scores = self.scores
        self.scores = None
        self.scored_by = None
        if scores is not None:
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            are_probabilities = (scores >= 0).all() & ((scores.sum(-1) - 1).abs() < _ROUNDING).all()
            probabilities = torch.where(are_probabilities, scores, scores.softmax(-1))
            sums = torch.special.entr(probabilities).sum(dtype=self.entropy.dtype)
            self.entropy += torch.stack([sums, torch.full_like(sums, scores.shape[:-1].numel())])


@dataclass(kw_only=True)
class ExpertCounts:
    """Counts of all modules of experts of a model, on any rank.

    Attributes:
        numbers: Number of experts of each module, by name, in the order of the model.
        table: (modules, largest number + 2) float64. A row holds the counts of a module, and the
            sums of its entropies in the last two columns; it is zero for modules of other ranks.
    """

    numbers: Mapping[str, int]
    table: Tensor
    _hooks: list[RemovableHandle] = field(default_factory=list)

    @classmethod
    def attach(cls, trainer: Trainer, module: LightningModule) -> ExpertCounts:
        """Start to count; collective over the ranks of a pipeline."""
        kind = Experts()
        modules = {name: child for name, child in module.named_modules() if kind.fits(child)}
        numbers = {name: _number(trainer, child) for name, child in modules.items()}
        numbers = _of_all_stages(trainer, numbers)
        shape = (len(numbers), max(numbers.values(), default=0) + 2)
        table = torch.zeros(shape, dtype=torch.float64, device=trainer.strategy.root_device)
        counts = cls(numbers=numbers, table=table)
        rows = dict(zip(numbers, table, strict=True))
        for name, experts in modules.items():
            layer = _Layer(counts=rows[name][: numbers[name]], entropy=rows[name][-2:])
            siblings = [
                child
                for child in module.get_submodule(name.rpartition(".")[0]).children()
                if child is not experts
            ]
            counts._hooks += layer.attach(experts, siblings)
        return counts

    def detach(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()

    def aside(self) -> Callable[[], object]:
        """Set the counts aside and count from zero; return a function that restores them.

        The function discards the counts made meanwhile."""
        saved = self.table.clone()
        self.table.zero_()
        return lambda: self.table.copy_(saved)

    def take(self, trainer: Trainer) -> list[LayerLoad]:
        """Return and reset the counts since the last call, over all ranks.

        The layers are in the order of the model. Collective, and waits for the device."""
        if not self.numbers:
            return []
        table = self.table.clone()
        self.table.zero_()
        rows = trainer.strategy.reduce(table, dist.group.WORLD, "sum").tolist()
        return [
            LayerLoad(
                name=name,
                loads=tuple(number * count / total for count in row[:number]),
                router_entropy=row[-2] / row[-1] / math.log(max(2, number)) if row[-1] else None,
            )
            for (name, number), row in zip(self.numbers.items(), rows, strict=True)
            if (total := sum(row[:number]))
        ]


def _number(trainer: Trainer, experts: nn.Module) -> int:
    """Return the number of experts on all ranks."""
    first = next(experts.parameters())
    parallel = getattr(trainer.strategy, "parallel", None)
    if parallel is None:
        return first.size(0)
    return int(parallel.parameters[first].placement.full_shape[0])


def _of_all_stages(trainer: Trainer, numbers: dict[str, int]) -> dict[str, int]:
    mesh = getattr(trainer.strategy, "mesh", None)
    parts = [numbers] if mesh is None else mesh.group("pipeline").gather(numbers)
    merged = {name: number for part in parts for name, number in part.items()}
    return {name: merged[name] for name in sorted(merged, key=_natural)}


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
