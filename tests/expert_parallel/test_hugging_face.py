"""Unmodified Hugging Face mixtures with distributed experts, compared with a single process."""

import re
import warnings

import pytest

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.strategy.checks.module_content import warn_of_balance_losses
from tests.huggingface.architectures import build
from tests.huggingface.unseen import Run, check, refusal
from tests.letters import ET, SP, C, E, M, P, T, V

pytestmark = pytest.mark.thorough

pytest.importorskip("transformers")

STEPS, CLIP = 2, 0.1


def run_of(name, **options):
    return Run(architecture=name, steps=STEPS, clip=CLIP, options=options)


@pytest.mark.parametrize(
    ("name", "world_size", "layout"),
    [
        ("mixtral", 2, {E: 2}),
        ("qwen3_moe", 4, {E: 4}),
        ("mixtral", 4, {E: 2, T: 2}),
        ("mixtral", 4, {E: 2, P: 2, V: 2, M: 2}),
        ("qwen3_moe", 4, {E: 2, P: 2, V: 2, M: 2}),
        ("qwen3_moe", 4, {E: 2, "shard": "optimizer"}),
        ("mixtral", 4, {E: 2, "shard": "gradients"}),
        ("mixtral", 2, {E: 2, C: 2}),
        ("qwen3_moe", 2, {E: 2, C: 2}),
        ("qwen3_moe", 8, {E: 2, T: 2, SP: True, P: 2, M: 2}),
        ("gpt_oss", 2, {E: 2, M: 2}),
        ("glm4_moe", 2, {E: 2}),
        ("nemotron_h", 2, {E: 2}),
        ("gpt_oss", 2, {T: 2, ET: 2}),
        ("gpt_oss", 4, {T: 2, ET: 2, E: 2, SP: True, "shard": "optimizer"}),
        ("mixtral", 4, {T: 2, ET: 2, P: 2, M: 2}),
    ],
)
def test_losses_and_weights_equal_single_process(name, world_size, layout, parity):
    check(run_of(name), (world_size, layout), parity)


BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, {P: 2, M: 1}), (2, {T: 2})], ids=["p2", "t2"]
)
def test_balance_loss_of_full_batch_equals_single_process(world_size, layout, parity):
    check(run_of("mixtral", **BALANCED), (world_size, layout), parity)


@pytest.mark.parametrize(
    ("layout", "replicas", "told"),
    [
        ({}, 1, False),
        ({P: 2, M: 1}, 1, False),
        ({M: 2}, 1, True),
        ({E: 2}, 2, True),
        ({C: 2}, 2, True),
    ],
    ids=["one process", "p2", "m2", "e2", "c2"],
)
def test_balance_loss_of_partial_batch_warns(layout, replicas, told):
    strategy = PTDPStrategy(**layout)
    found = strategy.config.layout(replicas * layout.get(P, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_balance_losses(build("mixtral", **BALANCED), strategy.config, found)
        warn_of_balance_losses(build("mixtral"), strategy.config, found)
    said = f"output_router_logits=True.* which here is a microbatch on one of {replicas} replicas"
    assert [bool(re.match(said, str(one.message))) for one in caught] == [True] * told


def test_balance_loss_with_sequence_parallel_is_refused(pool):
    run = run_of("mixtral", **BALANCED).on((2, {T: 2, SP: True}))
    (said,) = pool.run(refusal, world_size=1, args=(run,))
    assert said.startswith(
        "output_router_logits=True cannot be combined with sequence_parallel=True"
    )


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": [], "target_parameters": ["mlp.gate.weight"]},
    ],
    ids=["attention", "router"],
)
def test_lora_outside_experts_equals_single_process(lora, parity):
    pytest.importorskip("peft")
    check(Run(architecture="mixtral", steps=2, lora={"r": 2, **lora}), (2, {E: 2}), parity)


def test_lora_on_sharded_experts_is_refused_before_launch(pool):
    pytest.importorskip("peft")
    lora = {"r": 2, "target_modules": [], "target_parameters": ["experts.gate_up_proj"]}
    run = Run(architecture="mixtral", layout={E: 2}, world_size=2, lora=lora)
    (said,) = pool.run(refusal, world_size=1, args=(run,))
    assert "layers.0.mlp.experts' has an adapter on a MixtralExperts" in said
    assert "which expert_parallel_size > 1 cannot split" in said
