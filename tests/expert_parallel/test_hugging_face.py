"""Hugging Face's mixtures, unmodified, with their experts shared out: all weights are as one process has them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.huggingface.unseen import Run, differences, fit, one_process, refusal
from tests.pool import Pool

pytest.importorskip("transformers")

T, P, V, M, C, SP = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_size",
    "num_microbatches",
    "context_parallel_size",
    "sequence_parallel",
)
E, ET = "expert_parallel_size", "expert_tensor_parallel_size"


@pytest.mark.parametrize(
    ("name", "world_size", "layout"),
    [
        ("mixtral", 2, {E: 2}),
        ("mixtral", 4, {E: 2, "shard_optimizer": True}),
        ("mixtral", 4, {E: 2, T: 2}),
        ("qwen3_moe", 4, {E: 2, T: 2, SP: True}),
        ("qwen3_moe", 4, {E: 2, P: 2, V: 2, M: 2}),
        ("mixtral", 2, {E: 2, C: 2}),
        ("gpt_oss", 2, {E: 2, M: 2}),
        ("gpt_oss", 2, {T: 2, ET: 2}),
        ("gpt_oss", 4, {T: 2, ET: 2, E: 2, SP: True, "shard_optimizer": True}),
        ("mixtral", 4, {T: 2, ET: 2, P: 2, M: 2}),
    ],
)
def test_same_weights_as_one_process(name: str, world_size: int, layout: dict[str, Any], pool: Pool) -> None:
    run = Run(architecture=name, layout=layout, world_size=world_size, steps=2)
    assert pool.run(refusal, world_size=1, args=(run,)) == [None]
    expected = pool.run(fit, world_size=1, args=(one_process(run),))[0]
    for found in pool.run(fit, world_size=run.world_size, args=(run,)):
        assert differences(found, expected) == []
