"""Cases of the runtime tests: a small model, its data, reference results and the schedules."""

import itertools
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.schedule import Action, ActionKind, CustomSchedule, Schedule, build_schedule

VOCABULARY, WIDTH = 11, 6
TIED = {"head.weight": "embedding.weight"}
Gradients = dict[str, Tensor]


class Core(nn.Module):
    """W2 gelu(W1 x), added to another tensor."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.census: Any = None

    def forward(self, x, beside):
        if self.census is not None:
            self.census.calls += 1
        inside = F.gelu(self.up(x))
        output = beside + self.down(inside)
        if self.census is not None:
            self.census.note(inside, output)
        return output


class Block(nn.Module):
    """A residual layer: x + core(norm(x))."""

    def __init__(self):
        super().__init__()
        self.norm, self.core = nn.LayerNorm(WIDTH), Core()

    def forward(self, x):
        return self.core(self.norm(x), x)


class Net(nn.Module):
    """Embedding, blocks, norm and tied head; ``forward`` returns the loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def uneven_ranges(stages: int) -> tuple[tuple[int, int], ...]:
    """Return ranges of one layer per stage, but two in stages 1, 4, 7, …, and in a single stage."""
    sizes = [2 if stage % 3 == 1 or stages == 1 else 1 for stage in range(stages)]
    return tuple(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def make_net(stages: int, dtype: torch.dtype = torch.float64) -> Net:
    """Return the whole model for ``uneven_ranges``, with the same weights on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Net(uneven_ranges(stages)[-1][1]).to(dtype)


@dataclass(frozen=True)
class Microbatch:
    """(b, s) tokens and labels, and the microbatch's share of the loss."""

    ids: Tensor
    labels: Tensor
    share: float


def make_batch(count: int, *, seed: int = 0) -> list[Microbatch]:
    """Return microbatches of different shapes, which depend only on the index and the seed."""
    generator = torch.Generator().manual_seed(100 + seed)
    batch = []
    for index in range(count):
        shape = (1 + (index + seed) % 2, 3 + (index + seed) % 3 + seed)
        ids, labels = (torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(2))
        batch.append(Microbatch(ids, labels, (1 + index % 3) / 4))
    return batch


@dataclass(frozen=True)
class Expected:
    """Losses and gradients of the whole model, by microbatch."""

    losses: list[float]
    parts: list[Gradients]

    @cached_property
    def gradients(self) -> Gradients:
        """Gradients summed over all microbatches."""
        return {
            name: torch.stack([part[name] for part in self.parts]).sum(0) for name in self.parts[0]
        }


@cache
def unsplit(
    count: int, *, stages: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Expected:
    """Return losses and gradients of the whole model for a batch, one microbatch after another."""
    net, losses, parts = make_net(stages, dtype), [], []
    for microbatch in make_batch(count, seed=seed):
        loss = net(microbatch.ids, microbatch.labels)
        gradients = torch.autograd.grad(loss * microbatch.share, list(net.parameters()))
        losses.append(loss.item())
        parts.append(dict(zip(dict(net.named_parameters()), gradients, strict=True)))
    return Expected(losses, parts)


@dataclass(frozen=True)
class Case:
    """A schedule on p ranks with v stages each."""

    schedule: str | CustomSchedule
    p: int
    v: int = 1
    group_size: int | None = None

    def __str__(self) -> str:
        name = self.schedule if isinstance(self.schedule, str) else self.schedule.name
        return (
            f"{name} p{self.p}"
            + f" v{self.v}" * (self.v > 1)
            + (f" groups of {self.group_size}" if self.group_size else "")
        )

    def build(self, m: int, *, training: bool = True) -> Schedule:
        """Return the schedule of m microbatches."""
        return build_schedule(
            self.schedule,
            pipeline_parallel_size=self.p,
            virtual_pipeline_size=self.v,
            num_microbatches=m,
            training=training,
            group_size=self.group_size,
        )


def weights_at_the_end(p: int, v: int, m: int) -> list[list[Action]]:
    """Return 1F1B orders with all weight gradients after the last backward, newest first."""
    orders = []
    for rank, program in enumerate(
        build_schedule("1f1b", pipeline_parallel_size=p, num_microbatches=m).programs
    ):
        order = [
            action for action in program if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        ]
        orders.append(
            [
                *order,
                *(Action(ActionKind.WEIGHT, rank, microbatch) for microbatch in reversed(range(m))),
            ]
        )
    return orders


def unsplit_in_a_v(p: int, v: int, m: int) -> list[list[Action]]:
    """Return orders of a V placement: all forwards, then all backwards, not split."""
    ranks = [(rank, 2 * p - 1 - rank) for rank in range(p)]
    forwards = [
        [Action(ActionKind.FORWARD, stage, i) for stage in stages for i in range(m)]
        for stages in ranks
    ]
    backwards = [
        [Action(ActionKind.BACKWARD, stage, i) for stage in stages[::-1] for i in range(m)]
        for stages in ranks
    ]
    return [first + then for first, then in zip(forwards, backwards, strict=True)]


def cases(p: int) -> list[Case]:
    """Return every schedule that p ranks can run."""
    late = Case(CustomSchedule("weights at the end", weights_at_the_end), p)
    if p == 1:
        return [Case("1f1b", 1), late]
    return [
        *(Case("gpipe", p, v) for v in (1, 2, 3)),
        Case("1f1b", p),
        *(Case("interleaved_1f1b", p, v) for v in (2, 3)),
        Case("interleaved_1f1b", p, 2, group_size=p + 1),
        Case("zb_h1", p),
        Case("zb_v", p, 2),
        Case("dualpipe_v", p, 2),
        late,
        Case(CustomSchedule("unsplit in a v", unsplit_in_a_v, placement="v"), p, 2),
    ]
