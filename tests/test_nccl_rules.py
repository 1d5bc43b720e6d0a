"""Communicator calls of real trainings, checked against NCCL's rules.

All members of a group issue the same operations in the same order, and no ranks wait in a cycle.
This holds with one queue per stream and with a shared queue.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.models import AdamWConfig, GPTConfig, LitGPT
from lightning_ptdp.pipeline.program_observers import StepObserver
from tests.conformance.toys import Place, assert_weights, make_trainer, weights
from tests.nccl_calls import Call, operations_of
from tests.parity import checks_of_rank_0
from tests.queued import HOST
from tests.schedule.streams import stuck_operations

pytestmark = pytest.mark.thorough

LAYOUTS = {
    "d4": {},
    "d4 two levels": {
        "data_parallel_replicas": 2,
        "num_microbatches": 2,
        "bucket_mb": 1e-2,
        "reduce_dtype": "bfloat16",
    },
    "d4 ZeRO two levels": {
        "shard": "optimizer",
        "data_parallel_replicas": 2,
        "num_microbatches": 2,
    },
    "p2 d2": {"pipeline_parallel_size": 2, "num_microbatches": 4},
    "p2 t2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_microbatches": 4},
    "p2 t2 SP ZB-H1": {
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "tensor_overlap": 3,
        "num_microbatches": 4,
        "schedule": "zb_h1",
    },
    "p2 v2 d2 ZeRO": {
        "pipeline_parallel_size": 2,
        "virtual_pipeline_size": 2,
        "num_microbatches": 4,
        "shard": "optimizer",
    },
    "c2 p2": {"context_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 4},
    "t2 d2 recomputed": {"tensor_parallel_size": 2, "num_microbatches": 2, "recompute": "full"},
    "p4 ZB-V": {
        "pipeline_parallel_size": 4,
        "virtual_pipeline_size": 2,
        "num_microbatches": 8,
        "schedule": "zb_v",
    },
}


class LitWatched(LitGPT, StepObserver):
    """Module that records the connections open when the first program begins."""

    before: list[Any] | None = None

    def on_sanity_check_start(self):
        self.trainer.strategy.observers.add(self)

    def began(self, schedule):
        self.before = list(HOST.met) if self.before is None else self.before


@dataclass(frozen=True)
class Trained:
    """Calls of a rank, connections that it opened during steps, and all weights."""

    calls: list[Call]
    late: list[Any]
    weights: dict[str, Tensor]


def fit(rank, world_size, options, samples, layers):
    """Train with all samples in every step.

    The assignment of samples to replicas therefore does not matter.
    """
    torch.manual_seed(0)
    sizes = {
        "vocabulary_size": 32,
        "sequence_length": 8,
        "num_layers": layers,
        "hidden_size": 16,
        "num_heads": 2,
    }
    module = LitWatched(GPTConfig.gpt2(**sizes), AdamWConfig(learning_rate=1e-3, eps=1e-5))
    tokens = torch.randint(32, (samples, 9))
    rows = [{"input_ids": row[:-1].clone(), "labels": row[1:].clone()} for row in tokens]
    batch_size = samples // PTDPConfig(**options).layout(world_size).num_replicas
    loaders = [torch.utils.data.DataLoader(rows, batch_size=batch_size) for _ in range(2)]
    place = Place(world_size=world_size, layout=options)
    trainer = make_trainer(
        place, max_steps=2, max_epochs=None, gradient_clip_val=0.5, num_sanity_val_steps=1
    )
    with checks_of_rank_0(rank):
        trainer.fit(module, *loaders)
    # Neighbours in a ring reach the same attention at the same time.
    late = [
        made
        for made in HOST.met
        if made not in (module.before or HOST.met) and made[0] != "batches"
    ]
    return Trained(list(HOST.calls), late, weights(trainer))


@pytest.fixture(scope="module")
def expected(pool):
    """Return a function from the numbers of samples and layers to single-process weights."""
    return cache(lambda *sizes: pool.run(fit, world_size=1, args=(1, {}, *sizes))[0].weights)


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_obeys_nccl_ordering_rules(name, pool, expected):
    config = PTDPConfig(**LAYOUTS[name])
    sizes = 8 * config.layout(4).num_replicas, max(4, config.num_stages)
    trained = pool.run(fit, world_size=4, args=(4, LAYOUTS[name], *sizes), backend="queued")
    assert [rank.late for rank in trained] == [[]] * 4
    assert_weights(
        trained[0].weights,
        expected(*sizes),
        tolerance=1e-3 if "reduce_dtype" in LAYOUTS[name] else 1e-4,
    )
    ranks = [rank.calls for rank in trained]
    programs = [operations_of(calls) for calls in ranks]
    assert min(map(len, programs)) > 20
    for one_queue in (False, True):
        stuck = stuck_operations(programs, one_queue=one_queue)
        assert stuck == [None] * 4, [
            operation and (operation.name, operation.meets) for operation in stuck
        ]
    for first, second in neighbours_in_one_group(ranks[1]):
        swapped = list(ranks[1])
        swapped[first], swapped[second] = swapped[second], swapped[first]
        others = [programs[0], operations_of(swapped), *programs[2:]]
        assert any(stuck_operations(others)), "a rank with a different order is not detected"


def neighbours_in_one_group(calls):
    """Return the first three pairs of different consecutive collectives in one group.

    A pair holds their indices in ``calls``.
    """
    issued = [place for place, call in enumerate(calls) if call.group[1]]
    pairs = [
        (i, j)
        for i, j in pairwise(issued)
        if calls[i].group == calls[j].group and calls[i] != calls[j]
    ]
    return [
        (i, j) for i, j in pairs if not {calls[i].what, calls[j].what} & {"send", "recv", "batch"}
    ][:3]
