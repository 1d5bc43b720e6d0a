"""All that the ranks of a real training give to their communicators would run on NCCL: every group's members issue the same in one order,
and nobody waits in a circle, where streams have queues of their own and where they share one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_ptdp.data_parallel import reduction
from lightning_ptdp.models import AdamWConfig, GPTConfig, LitGPT
from tests.conformance.toys import Place, make_trainer
from tests.nccl_recorder import Call, operations_of, recording
from tests.pool import Pool
from tests.schedule.streams import stuck_operations

LAYOUTS: dict[str, dict[str, Any]] = {
    "d4": {},
    "d4 two levels": {"data_parallel_replicas": 2, "num_microbatches": 2, "bucket_mb": 1e-2, "reduce_dtype": "bfloat16"},
    "d4 ZeRO two levels": {"shard_optimizer": True, "data_parallel_replicas": 2, "num_microbatches": 2},
    "p2 d2": {"pipeline_parallel_size": 2, "num_microbatches": 4},
    "p2 t2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_microbatches": 4},
    "p2 t2 SP ZB-H1": {
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "num_microbatches": 4,
        "schedule": "zb_h1",
    },
    "p2 v2 d2 ZeRO": {
        "pipeline_parallel_size": 2,
        "virtual_pipeline_size": 2,
        "num_microbatches": 4,
        "shard_optimizer": True,
    },
    "c2 p2": {"context_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 4},
    "t2 d2 recomputed": {"tensor_parallel_size": 2, "num_microbatches": 2, "recompute": "full"},
    "p4 ZB-V": {"pipeline_parallel_size": 4, "virtual_pipeline_size": 2, "num_microbatches": 8, "schedule": "zb_v"},
}


def fit(rank: int, options: dict[str, Any]) -> list[Call]:
    torch.manual_seed(0)
    sizes = {"vocabulary_size": 32, "sequence_length": 8, "num_layers": 8, "hidden_size": 16, "num_heads": 2}
    module = LitGPT(GPTConfig.gpt2(**sizes), AdamWConfig(learning_rate=1e-3))
    tokens = torch.randint(32, (32, 9))
    rows = [{"input_ids": row[:-1].clone(), "labels": row[1:].clone()} for row in tokens]
    loaders = [torch.utils.data.DataLoader(rows, batch_size=8) for _ in range(2)]
    # What gloo has instead of two collectives, messages between all, NCCL never runs.
    with mock.patch.object(reduction, "_is_gloo", return_value=False), recording() as calls:
        trainer = make_trainer(Place(world_size=4, layout=options), max_steps=3, gradient_clip_val=0.5, num_sanity_val_steps=1)
        trainer.fit(module, *loaders)
    return calls


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_training_runs_on_the_rules_of_nccl(name: str, pool: Pool) -> None:
    ranks = pool.run(fit, world_size=4, args=(LAYOUTS[name],))
    programs = [operations_of(calls) for calls in ranks]
    assert min(map(len, programs)) > 20
    for one_queue in (False, True):
        stuck = stuck_operations(programs, one_queue=one_queue)
        assert stuck == [None] * 4, [operation and (operation.name, operation.meets) for operation in stuck]
    for place in neighbours_in_one_group(ranks[1]):
        swapped = [*ranks[1][:place], ranks[1][place + 1], ranks[1][place], *ranks[1][place + 2 :]]
        others = [programs[0], operations_of(swapped), *programs[2:]]
        assert any(stuck_operations(others)), "a rank with an order of its own would not be noticed"


def neighbours_in_one_group(calls: list[Call]) -> list[int]:
    """Where two different collectives of one group follow each other: the first three such places."""
    pairs = enumerate(pairwise(calls))
    places = [i for i, (a, b) in pairs if a.group == b.group and a.group[1] and a != b and "send" not in a.what + b.what]
    return [i for i in places if "recv" not in calls[i].what + calls[i + 1].what and not calls[i].is_async][:3]
