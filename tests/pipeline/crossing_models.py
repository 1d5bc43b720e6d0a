"""Models whose blocks take and return several tensors, and a pipeline emulated in one process."""

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
from lightning_ptdp.tensor_parallel import ParallelPlan

EXACT = {"rtol": 1e-12, "atol": 1e-12}
WIDTH, RANGES = 6, ((0, 1), (1, 3), (3, 4))


class Block(nn.Module):
    """Block that mixes a hidden state with an optional second tensor."""

    def __init__(self):
        super().__init__()
        self.own, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def mix(self, x: Tensor, other: Tensor) -> Tensor:
        return x + torch.tanh(self.own(x) + self.other(other))

    def forward(self, x, other=None):
        return self.mix(x, x if other is None else other)


class Base(nn.Module):
    """Embedding, four blocks and head; subclasses differ in ``run_blocks``."""

    def __init__(
        self, block: Callable[[], nn.Module] = Block, memory: Callable[[], nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.memory = nn.Linear(WIDTH, WIDTH) if memory is None else memory()
        self.layers = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def chain(self, x: Tensor, *shared: Any) -> Tensor:
        """Call the blocks one after the other, each with the same further arguments."""
        for layer in self.layers:
            x = layer(x, *shared)
        return x

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.chain(x)

    def forward(self, ids):
        return self.head(self.run_blocks(self.embedding(ids), ids))


class Narrowing(Base):
    """Each block changes the width."""

    def __init__(self):
        super().__init__()
        widths = (WIDTH, 9, 2, 5, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(here, there), nn.Tanh()) for here, there in pairwise(widths)
        )


class InPlace(Base):
    """Each block modifies its input in place."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )


class Scaling(Narrowing):
    """A user's hook on each block changes its input."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.register_forward_pre_hook(self.scale)

    @staticmethod
    def scale(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (2 * args[0], *args[1:])


class PairBlock(Block):
    def forward(self, x, y):
        return self.mix(x, y), self.mix(y, x)


class Pair(Base):
    """Two streams of hidden states."""

    def __init__(self):
        super().__init__(PairBlock)

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.memory(x)
        for layer in self.layers:
            x, y = layer(x, y)
        return x * y


class BackwardHooked(Pair):
    """A user's hook on each block changes the gradients of its inputs."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.register_full_backward_hook(self.halve)

    @staticmethod
    def halve(
        module: nn.Module, grad_input: tuple[Tensor, ...], grad_output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        return tuple(gradient / 2 for gradient in grad_input)


class NestBlock(Block):
    def forward(self, state):
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
    """Nested structure of differentiable tensors, integers, booleans and constants."""

    def __init__(self):
        super().__init__(NestBlock)

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        counts = {"seen": torch.zeros_like(ids), "kept": ids > 1}
        state = {"x": x, "rest": [x * 2, counts], "name": "", "scale": 0.5}
        for layer in self.layers:
            state = layer(state)
        return (state["x"] + state["rest"][0]) * state["scale"]


class Memory(Base):
    """All blocks take the same tensor, computed before the first block."""

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        memory = torch.tanh(self.memory(x))
        return self.chain(x, memory)


class FrozenMemory(Memory):
    """Embedding and memory are frozen, as in fine-tuning."""

    def __init__(self):
        super().__init__()
        self.embedding.requires_grad_(False)
        self.memory.requires_grad_(False)


class RecomputedMemory(Base):
    """Blocks with activation recomputation."""

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        memory = self.memory(x)
        for layer in self.layers:
            x = checkpoint(layer, x, memory, use_reentrant=False)
        return x


class Skip(Base):
    """Every second block takes the embedding as a keyword argument."""

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        first = x
        for index, layer in enumerate(self.layers):
            x = layer(x, other=first) if index % 2 else layer(x)
        return x


class Sometimes(Base):
    """All blocks take the memory except the first block of the second stage."""

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        memory = self.memory(x)
        for index, layer in enumerate(self.layers):
            x = layer(x) if index == 1 else layer(x, memory)
        return x


class Shifted(Base):
    """The memory is copied into a tensor that the model allocates."""

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        memory = torch.zeros_like(x)
        memory[:, 1:] = x[:, :-1]
        memory[:, :1].add_(x[:, -1:])
        return self.chain(x, memory)


class ContextBlock(Block):
    def forward(self, x, *, context):
        memory, mask = context["memory"]
        return self.mix(x, memory * mask), memory


class Context(Base):
    """The memory is nested next to a mask that every stage computes. Blocks also return it."""

    def __init__(self):
        super().__init__(ContextBlock)

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        context = {"memory": (self.memory(x), (ids > 0).unsqueeze(-1)), "other": None}
        for layer in self.layers:
            x, _ = layer(x, context=context)
        return x


class OwnBias(nn.Module):
    """Bias used before the blocks. Its type cannot be stubbed, so every stage keeps it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self):
        return self.weight * 2


class KeptBias(Base):
    def __init__(self):
        super().__init__(memory=OwnBias)

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        bias = self.memory()
        return self.chain(x, bias)


class Uncalled(Base):
    """Weights used without calling their modules: one before and one after the blocks."""

    def __init__(self):
        super().__init__(memory=lambda: nn.Embedding(3, WIDTH))
        self.example_input_array = ids()

    def run_blocks(self, x: Tensor, ids: Tensor) -> Tensor:
        bias = torch.tanh(self.memory.weight).sum(0)
        return self.chain(x, bias) @ self.embedding.weight.t() @ self.embedding.weight


MODELS = (
    Narrowing,
    InPlace,
    Scaling,
    Pair,
    BackwardHooked,
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
    """Return the whole model in float64, with the same weights on every call."""
    torch.manual_seed(0)
    return model().double()


def crossing_of(output: object, *, replicated: bool = False) -> Crossing:
    """Return a crossing of all tensors of ``output``, differentiable if they require a gradient."""
    tensors = tuple({id(tensor): tensor for _, tensor in tensors_in(output)}.values())
    index = {id(tensor): i for i, tensor in enumerate(tensors)}
    forms = tuple(
        TensorForm.of(tensor, differentiable=tensor.requires_grad, replicated=replicated)
        for tensor in tensors
    )
    return Crossing(
        tensors, Form(tensors=forms, output=describe(output, lambda tensor: index[id(tensor)], "?"))
    )


def ids(samples: int = 2, length: int = 5) -> Tensor:
    """Return a batch of token ids."""
    return torch.randint(
        0, 11, (samples, length), generator=torch.Generator().manual_seed(samples * length)
    )


class Emulated:
    """Stages of a model in one process, with crossings passed directly between them."""

    def __init__(
        self,
        whole: nn.Module,
        ranges: tuple[tuple[int, int], ...] = RANGES,
        *,
        collects: bool = False,
        **known: Any,
    ) -> None:
        self.parts = [copy.deepcopy(whole) for _ in ranges]
        places = find_parts(whole, ParallelPlan(**known))
        self.cuts = [
            PipelineCut(
                part,
                parts=places,
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
        """Return the model's output."""
        self.crossings, self.entered, self.roots = [], [], []
        entered = None
        for stage, (part, cut) in enumerate(zip(self.parts, self.cuts, strict=True)):
            self.entered.append(entered)
            result = cut.run(stage, entered, lambda part=part: part(*batch), training=training)
            if stage == cut.num_stages - 1:
                return result
            self.crossings.append(result)
            self.roots.append(result.roots())
            entered = result.entering(training=training)
        raise AssertionError("no stage was the last")

    def backward(self, loss: Tensor) -> None:
        """Run the backward of all stages."""
        roots, gradients = (loss,), None
        for stage in reversed(range(len(self.parts))):
            backward(roots, gradients)
            entered = self.entered[stage]
            if entered is not None:
                roots, gradients = self.roots[stage - 1], entered.gradients()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients, summed over the stages."""
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
    """Compare with the whole model in two training steps and in evaluation."""
    whole = build(model)
    stages = Emulated(whole, **options)
    # different shapes
    batches = [(ids(2, 5),), (ids(3, 4),)]
    assert_trains_as(whole, stages, batches, lambda output, _: output.square().sum())
    with torch.no_grad():
        torch.testing.assert_close(
            stages.forward(ids(), training=False), whole(ids()), rtol=0, atol=0
        )
    return stages
