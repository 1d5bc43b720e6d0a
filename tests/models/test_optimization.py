"""Decay groups and the learning rate."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_ptdp.models import GPT, AdamWConfig
from lightning_ptdp.models.optimizer_setup import (
    build_adamw,
    build_schedule,
    decay_groups,
    learning_rate_factor,
    resolve_decay_steps,
    samples_as_steps,
)
from lightning_ptdp.world.batch_size import RampUp
from tests.models.configs import GPT2, LLAMA


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_only_matrices_and_embeddings_decay(config):
    model = GPT(config)
    optimizer = build_adamw(
        model, AdamWConfig(learning_rate=0.5, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    )
    decaying, rest = optimizer.param_groups
    assert (decaying["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert (decaying["lr"], decaying["betas"], decaying["eps"]) == (0.5, (0.8, 0.9), 1e-6)
    names = {id(p): name for name, p in model.named_parameters()}
    assert all(
        names[id(p)].endswith("weight") and "norm" not in names[id(p)] for p in decaying["params"]
    )
    assert all("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in rest["params"])
    assert len(decaying["params"]) + len(rest["params"]) == len(names)


def test_decay_groups_are_independent_of_other_modules():
    model = GPT(LLAMA)
    whole = [
        {id(p) for p in group["params"]} for group in decay_groups(model.named_parameters(), 0.1)
    ]
    for part in (model.blocks[1], model.wte, model.norm):
        groups = decay_groups(part.named_parameters(), 0.1)
        assert len(groups) == 2
        assert all(
            {id(p) for p in group["params"]} <= whole[index] for index, group in enumerate(groups)
        )


def test_empty_group_is_kept_and_frozen_parameters_are_skipped():
    linear = nn.Linear(2, 2, bias=False)
    optimizer = build_adamw(linear, AdamWConfig())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]
    linear.weight.grad = torch.ones(2, 2)
    optimizer.step()
    linear.weight.requires_grad_(False)
    assert decay_groups(linear.named_parameters(), 0.1)[0]["params"] == []


def test_adamw_is_fused_if_supported():
    linear = nn.Linear(2, 2)
    assert build_adamw(linear, AdamWConfig()).defaults["fused"]
    assert not build_adamw(nn.Linear(2, 2, device="meta"), AdamWConfig()).defaults["fused"]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.1),
        (4, 0.5),
        (9, 1.0),
        (10, 1.0),
        (35, 0.2 + 0.8 * 0.8535533906),
        (60, 0.6),
        (110, 0.2),
        (5000, 0.2),
    ],
)
def test_cosine_learning_rate(step, expected):
    factor = learning_rate_factor(step, warmup_steps=10, decay_steps=110, min_lr_ratio=0.2)
    assert factor == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("step", "expected"), [(4, 0.5), (10, 1.0), (35, 0.8), (60, 0.6), (110, 0.2), (5000, 0.2)]
)
def test_linear_learning_rate(step, expected):
    config = AdamWConfig(learning_rate=1.0, warmup_steps=10, min_lr_ratio=0.2, decay="linear")
    (factor, _) = build_schedule(
        build_adamw(nn.Linear(2, 2), config), config, decay_steps=110
    ).lr_lambdas
    assert factor(step) == pytest.approx(expected, abs=1e-9)


def test_first_step_without_warmup_has_peak_learning_rate():
    assert learning_rate_factor(0, warmup_steps=0, decay_steps=10, min_lr_ratio=0.0) == 1.0
    assert learning_rate_factor(10, warmup_steps=10, decay_steps=10, min_lr_ratio=0.5) == 1.0


def test_schedule_is_picklable_and_resumes_with_new_settings():
    optimizer = build_adamw(nn.Linear(2, 2), AdamWConfig(learning_rate=2.0))
    schedule = build_schedule(
        optimizer, AdamWConfig(learning_rate=2.0, warmup_steps=4), decay_steps=8
    )
    pickle.dumps(schedule)
    seen = []
    for _ in range(4):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == [0.5, 1.0, 1.5, 2.0]
    resumed = build_schedule(
        build_adamw(nn.Linear(2, 2), AdamWConfig()), AdamWConfig(min_lr_ratio=1.0), decay_steps=100
    )
    resumed.load_state_dict(schedule.state_dict())
    assert resumed.lr_lambdas[0](50) == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"min_lr_ratio": 2.0}, "min_lr_ratio=2.0"),
        ({"warmup_steps": 20, "decay_steps": 10}, "decay_steps=10 .*warmup_steps=20"),
    ],
)
def test_invalid_config_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        AdamWConfig(**changes)


def test_sample_counts_are_converted_to_ramp_up_steps():
    sizes = RampUp(start=4, stop=16, increment=4, samples=48)
    trainer = SimpleNamespace(
        datamodule=SimpleNamespace(step_sizes=sizes), accumulate_grad_batches=1
    )
    config = samples_as_steps(
        AdamWConfig(warmup_samples=8, decay_samples=sizes.consumed(9) + 1), trainer
    )
    assert (config.warmup_steps, config.decay_steps) == (2, 9)
    assert resolve_decay_steps(config, trainer) == 9
    with pytest.raises(ValueError, match="Use warmup_steps"):
        samples_as_steps(AdamWConfig(warmup_samples=8), SimpleNamespace(datamodule=None))
    with pytest.raises(ValueError, match="decay_samples=9 and decay_steps=3 are both set"):
        AdamWConfig(decay_samples=9, decay_steps=3)


def test_default_decay_counts_ramp_up_steps_of_all_epochs():
    loader = SimpleNamespace(steps_of_epochs=lambda epochs: 10 + 6 * (epochs - 1))
    for estimated, steps in ((30, 22), (20, 20)):
        trainer = SimpleNamespace(
            max_epochs=3,
            limit_train_batches=1.0,
            accumulate_grad_batches=1,
            train_dataloader=loader,
            estimated_stepping_batches=estimated,
        )
        assert resolve_decay_steps(AdamWConfig(), trainer) == steps
