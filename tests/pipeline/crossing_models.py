"""Models whose blocks take and return more than one tensor, and a pipeline emulated by hand in one
process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ptdp.pipeline.crossing import (
    Crossing,
    Form,
    TensorForm,
    backward,
    describe,
    tensors_in,
)
from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.pipeline.stage import PipelineCut

EXACT = {"rtol": 1e-12, "atol": 1e-12}
WIDTH, RANGES = 6, ((0, 1), (1, 3), (3, 4))


class Block(nn.Module):
    """Mixes a hidden state with whatever else it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def mix(self, x: Tensor, other: Tensor) -> Tensor:
        return x + torch.tanh(self.own(x) + self.other(other))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self.mix(x, x if other is None else other)


class Base(nn.Module):
    """Embedding, four blocks, head; ``blocks`` is what differs."""

    def __init__(
        self, block: Callable[[], nn.Module] = Block, memory: Callable[[], nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.memory = nn.Linear(WIDTH, WIDTH) if memory is None else memory()
        self.layers = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        raise AssertionError

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.run_blocks(self.embedding(ids), ids))


class Narrowing(Base):
    """Every block returns another width than it takes."""

    def __init__(self) -> None:
        super().__init__()
        widths = (WIDTH, 9, 2, 5, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(here, there), nn.Tanh()) for here, there in pairwise(widths)
        )

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class InPlace(Base):
    """Every block writes into what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class PairBlock(Block):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.mix(x, y), self.mix(y, x)


class Pair(Base):
    """Two streams."""

    def __init__(self) -> None:
        super().__init__(PairBlock)

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.memory(x)
        for layer in self.layers:
            x, y = layer(x, y)
        return x * y


class NestBlock(Block):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x, (y, counts) = state["x"], state["rest"]
        seen = counts["seen"] + (x.detach() > 0).sum(-1)
        return {
            "x": self.mix(x, y) * counts["kept"].unsqueeze(-1),
            "rest": [
                self.mix(y, x) + 0.01 * seen.unsqueeze(-1),
                {"seen": seen, "kept": counts["kept"]},
            ],
            "name": "state",
            "scale": 0.5,
        }


class Nest(Base):
    """A nest of tensors with gradients, integers, booleans and constants."""

    def __init__(self) -> None:
        super().__init__(NestBlock)

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        counts = {"seen": torch.zeros_like(ids), "kept": ids > 1}
        state = {"x": x, "rest": [x * 2, counts], "name": "", "scale": 0.5}
        for layer in self.layers:
            state = layer(state)
        return (state["x"] + state["rest"][0]) * state["scale"]


class Memory(Base):
    """Every block is given the same tensor from before the blocks."""

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        memory = torch.tanh(self.memory(x))
        for layer in self.layers:
            x = layer(x, memory)
        return x


class FrozenMemory(Memory):
    """As a fine-tuned model: neither the embedding nor the memory needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.memory.requires_grad_(False)


class RecomputedMemory(Base):
    """Blocks whose forward runs again in the backward."""

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        memory = self.memory(x)
        for layer in self.layers:
            x = checkpoint(layer, x, memory, use_reentrant=False)
        return x


class Skip(Base):
    """Every second block sees the embedding again, by keyword."""

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        first = x
        for index, layer in enumerate(self.layers):
            x = layer(x, other=first) if index % 2 else layer(x)
        return x


class Sometimes(Base):
    """The block behind the first stage is not given the memory, later ones are."""

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        memory = self.memory(x)
        for index, layer in enumerate(self.layers):
            x = layer(x) if index == 1 else layer(x, memory)
        return x


class Shifted(Base):
    """The memory is written into a tensor that the model makes itself."""

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        memory = torch.zeros_like(x)
        memory[:, 1:] = x[:, :-1]
        memory[:, :1].add_(x[:, -1:])
        for layer in self.layers:
            x = layer(x, memory)
        return x


class ContextBlock(Block):
    def forward(self, x: Tensor, *, context: dict[str, Any]) -> tuple[Tensor, Tensor]:
        memory, mask = context["memory"]
        return self.mix(x, memory * mask), memory


class Context(Base):
    """An extra inside of a nest, beside a mask that every stage computes; the block returns it
    too."""

    def __init__(self) -> None:
        super().__init__(ContextBlock)

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        context = {"memory": (self.memory(x), (ids > 0).unsqueeze(-1)), "other": None}
        for layer in self.layers:
            x, _ = layer(x, context=context)
        return x


class OwnBias(nn.Module):
    """Weights of its own in front of the blocks: of no type that can be stubbed, so that every
    stage keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self) -> Tensor:
        return self.weight * 2


class KeptBias(Base):
    def __init__(self) -> None:
        super().__init__(memory=OwnBias)

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        bias = self.memory()
        for layer in self.layers:
            x = layer(x, bias)
        return x


class Uncalled(Base):
    """A table's weight is used in front of the blocks without calling it, and the embedding's
    behind them."""

    def __init__(self) -> None:
        super().__init__(memory=lambda: nn.Embedding(3, WIDTH))
        self.example_input_array = ids()

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        bias = torch.tanh(self.memory.weight).sum(0)
        for layer in self.layers:
            x = layer(x, bias)
        return x @ self.embedding.weight.t() @ self.embedding.weight


MODELS = (
    Narrowing,
    InPlace,
    Pair,
    Nest,
    Memory,
    FrozenMemory,
    RecomputedMemory,
    Skip,
    Sometimes,
    Shifted,
    Context,
    KeptBias,
    Uncalled,
)


def build(model: type[Base]) -> Base:
    """The whole model in float64, the same on every call."""
    torch.manual_seed(0)
    return model().double()


def crossing_of(output: object, *, alike: bool = False) -> Crossing:
    """A crossing of ``output`` whole, its tensors differentiable where they require a gradient, and
    alike if they are ``alike``."""
    tensors = tuple({id(tensor): tensor for _, tensor in tensors_in(output)}.values())
    index = {id(tensor): i for i, tensor in enumerate(tensors)}
    forms = tuple(
        TensorForm.of(tensor, differentiable=tensor.requires_grad, alike=alike)
        for tensor in tensors
    )
    return Crossing(
        tensors, Form(tensors=forms, output=describe(output, lambda tensor: index[id(tensor)], "?"))
    )


def ids(samples: int = 2, length: int = 5) -> Tensor:
    """A batch."""
    return torch.randint(
        0, 11, (samples, length), generator=torch.Generator().manual_seed(samples * length)
    )


class Emulated:
    """The stages of a model in one process; what crosses is handed on by hand."""

    def __init__(
        self,
        whole: nn.Module,
        ranges: tuple[tuple[int, int], ...] = RANGES,
        *,
        collects: bool = False,
        **known: Any,
    ) -> None:
        self.parts = [copy.deepcopy(whole) for _ in ranges]
        self.cuts = [
            PipelineCut(
                part,
                parts=find_parts(part, **known),
                ranges=ranges,
                stages=(stage,),
                collects=collects,
            )
            for stage, part in enumerate(self.parts)
        ]
        self.crossings: list[Crossing] = []
        self.entered: list[Crossing | None] = []
        self.roots: list[Any] = []

    def forward(self, *batch: Any, training: bool) -> Any:
        """The model's output."""
        self.crossings, self.entered, self.roots = [], [], []
        entered = None
        for stage, (part, cut) in enumerate(zip(self.parts, self.cuts, strict=True)):
            self.entered.append(entered)
            result, last = cut.run(
                stage, entered, lambda part=part: part(*batch), training=training
            )
            if last:
                return result
            self.crossings.append(result)
            self.roots.append(result.roots())
            entered = result.entering(training=training)
        raise AssertionError("no stage was the last")

    def backward(self, loss: Tensor) -> None:
        """Through all stages."""
        roots, gradients = (loss,), None
        for stage in reversed(range(len(self.parts))):
            backward(roots, gradients)
            entered = self.entered[stage]
            if entered is not None:
                roots, gradients = self.roots[stage - 1], entered.gradients()

    def gradients(self) -> dict[str, Tensor]:
        """Sums over the stages."""
        found: dict[str, Tensor] = {}
        for part in self.parts:
            for name, parameter in part.named_parameters():
                if parameter.grad is not None:
                    found[name] = found[name] + parameter.grad if name in found else parameter.grad
        return found


def assert_trains_as(
    whole: nn.Module,
    stages: Emulated,
    batches: Iterable[tuple[Any, ...]],
    loss: Callable[..., Tensor],
) -> None:
    """Compare the outputs of all batches and the sums of their gradients.

    ``loss`` is called with the output and the batch.
    """
    for batch in batches:
        expected, found = whole(*batch), stages.forward(*batch, training=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        loss(expected, *batch).backward()
        stages.backward(loss(found, *batch))
    gradients = stages.gradients()
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(
                gradients[name],
                parameter.grad,
                **EXACT,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def as_the_whole(model: type[Base], **options: Any) -> Emulated:
    """Compare the loss and all gradients, in training twice, and in evaluation."""
    whole = build(model)
    stages = Emulated(whole, **options)
    # the shapes change
    batches = [(ids(2, 5),), (ids(3, 4),)]
    assert_trains_as(whole, stages, batches, lambda output, _: output.square().sum())
    with torch.no_grad():
        torch.testing.assert_close(
            stages.forward(ids(), training=False), whole(ids()), rtol=0, atol=0
        )
    return stages
