"""Our own GPT with experts trains in every layout as in one process: router's losses, bias and
capacity included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_ptdp import ParallelPlan, PTDPStrategy, Sampling, generate
from lightning_ptdp.models import GPT, LitGPT
from lightning_ptdp.models.experts import Capacity, Router
from tests.expert_parallel import toy
from tests.expert_parallel.own import Run, config_of, fit, module_of, trainer_of
from tests.letters import ET, SP, C, E, M, P, T, V, Z
from tests.pool import Pool

pytestmark = pytest.mark.thorough

LAYOUTS = {
    "e2": (2, {E: 2}),
    "e4 m2": (4, {E: 4, M: 2}),
    "t2 e2": (4, {T: 2, E: 2}),
    "p2": (2, {P: 2, M: 2}),
    "p2 v2 e2": (4, {P: 2, V: 2, E: 2, M: 2}),
    "p2 e2 zb_h1 recompute": (4, {P: 2, E: 2, M: 2, "schedule": "zb_h1", "recompute": "full"}),
    "d2 e2 zero": (4, {E: 2, Z: True}),
    "c2 e2": (2, {C: 2, E: 2}),
    "t2 sp p2 e2": (8, {T: 2, SP: True, P: 2, E: 2, M: 2}),
    "t2 et2": (2, {T: 2, ET: 2}),
    "t2 et2 e2 p2 sp": (8, {T: 2, ET: 2, E: 2, P: 2, M: 2, SP: True}),
    "t2 et2 e2 zero recompute": (4, {T: 2, ET: 2, E: 2, Z: True, "recompute": "full"}),
    "t2 sp c2 e2": (4, {T: 2, SP: True, C: 2, E: 2}),
}


Alone = Callable[[Run], dict[str, Any]]


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Alone:
    """Return a function that gives the results of a run in one process.

    Each run is trained once, because several layouts are compared with it.
    """
    found: dict[str, dict[str, Any]] = {}

    def run_alone(run: Run) -> dict[str, Any]:
        run = replace(run, world_size=1, layout={}, save=None)
        if repr(run) not in found:
            (found[repr(run)],) = pool.run(fit, world_size=1, args=(run,))
        return found[repr(run)]

    return run_alone


def check(pool: Pool, alone: Alone, run: Run) -> None:
    expected = alone(run)
    assert min(expected["norms"]) > run.clip, "the clipping threshold must bite"
    for found in pool.run(fit, world_size=run.world_size, args=(run,)):
        torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-5, atol=0)
        # What a replica logs is of its own samples.
        for mine, theirs in (
            zip(found["logged"], expected["logged"], strict=True) if found["replicas"] == 1 else ()
        ):
            assert mine == pytest.approx(theirs, rel=1e-5)
        assert found["final"].keys() == expected["final"].keys()
        for name, value in expected["final"].items():
            assert torch.equal(found["initial"][name], expected["initial"][name]), (
                f"{name} starts differently"
            )
            torch.testing.assert_close(
                found["final"][name], value, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_same_weights_as_one_process(
    world_size: int, layout: dict[str, Any], pool: Pool, alone: Alone
) -> None:
    check(
        pool,
        alone,
        Run(world_size=world_size, layout=layout, model={"shared_experts": 1, "dense_layers": 1}),
    )


@pytest.mark.parametrize(
    ("name", "score"),
    [("e4 m2", "sigmoid"), ("p2 e2 zb_h1 recompute", "sigmoid"), ("t2 sp c2 e2", "softmax")],
)
def test_a_bias_is_moved_as_in_one_process(name: str, score: str, pool: Pool, alone: Alone) -> None:
    world_size, layout = LAYOUTS[name]
    accumulate = 2 if name == "e4 m2" else 1
    layout = {key: value for key, value in layout.items() if accumulate == 1 or key != M}
    model = {
        "balance": "bias",
        "bias_rate": 0.03,
        "router_score": score,
        "shared_experts": 1,
        "dense_layers": 1,
    }
    run = Run(world_size=world_size, layout=layout, accumulate=accumulate, model=model)
    check(pool, alone, run)
    biases = [value for key, value in alone(run)["final"].items() if key.endswith("bias_nano")]
    assert len(biases) == 3
    assert all(value.any() for value in biases)


@pytest.mark.parametrize(("name", "balance"), [("c2 e2", "loss"), ("p2 v2 e2", "bias")])
def test_a_module_of_the_kind_that_people_write(
    name: str, balance: str, pool: Pool, alone: Alone
) -> None:
    world_size, layout = LAYOUTS[name]
    check(
        pool,
        alone,
        Run(world_size=world_size, layout=layout, model={"balance": balance}, usual=True),
    )


@pytest.mark.parametrize("name", ["e2", "t2 e2"])
def test_what_is_more_than_an_expert_takes_is_dropped_as_in_one_process(
    name: str, pool: Pool, alone: Alone
) -> None:
    world_size, layout = LAYOUTS[name]
    run = Run(world_size=world_size, layout=layout, model={"capacity_factor": 1.0})
    check(pool, alone, run)
    assert all(0 < step["train_dropped_share"] < 0.5 for step in alone(run)["logged"])


@pytest.mark.parametrize("name", ["e2", "t2 et2", "t2 et2 e2"])
def test_a_rank_holds_its_part_of_experts_of_their_gradients_and_of_the_optimizer(
    name: str, pool: Pool, alone: Alone
) -> None:
    world_size, layout = {**LAYOUTS, "t2 et2 e2": (4, {T: 2, ET: 2, E: 2})}[name]
    whole = alone(Run(steps=2))["held"]
    assert whole["states"] == 2 * whole["parameters"] == 2 * whole["gradients"]
    for found in pool.run(
        fit, world_size=world_size, args=(Run(world_size=world_size, layout=layout, steps=2),)
    ):
        assert {what: world_size * number for what, number in found["held"].items()} == whole


def test_a_checkpoint_of_split_experts_goes_on_in_another_layout(
    pool: Pool, tmp_path: Path
) -> None:
    folder, layout = str(tmp_path / "split.ckpt"), {T: 2, ET: 2, E: 2}
    (saved, *_) = pool.run(
        fit, world_size=4, args=(Run(world_size=4, layout=layout, steps=3, save=folder),)
    )
    (split, *_) = pool.run(
        fit, world_size=4, args=(Run(world_size=4, layout=layout, resume=folder),)
    )
    (found,) = pool.run(fit, world_size=1, args=(Run(resume=folder),))
    for name, value in saved["final"].items():
        assert torch.equal(found["initial"][name], value), name
        torch.testing.assert_close(found["final"][name], split["final"][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (
            {T: 4, ET: 2},
            r"expert_tensor_parallel_size=2 must be 4 \(.* tensor_parallel_size=4\) or 1",
        ),
        (
            {ET: 2},
            r"expert_tensor_parallel_size=2 .* tensor_parallel_size=1. Increase tensor_parallel_size",
        ),
    ],
)
def test_experts_are_split_over_all_tensor_ranks_or_none(layout: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PTDPStrategy(**layout)


def test_experts_that_cannot_be_split_are_refused_before_launch() -> None:
    layout = {T: 2, ET: 2, "start_method": "fork"}
    with pytest.raises(
        ValueError,
        match=r"inner width of an expert=9 .* expert_tensor_parallel_size=2. Sizes that work: "
        r"\[1, 3, 9\]",
    ):
        fit(0, Run(world_size=2, layout=layout, model={"expert_hidden_size": 9}))
    plan = ParallelPlan(tensor={"layers.*.experts": "experts"})
    with pytest.raises(
        ValueError,
        match=r"'layers.0.experts': expert_tensor_parallel_size=2 .* Experts does not have",
    ):
        toy.trainer_of(toy.Run(world_size=2, layout=layout | {"plan": plan})).fit(
            toy.LitMixture(toy.Run()), []
        )


def test_a_checkpoint_goes_on_in_another_layout(pool: Pool, alone: Alone, tmp_path: Path) -> None:
    folder, model = str(tmp_path / "four.ckpt"), {"balance": "bias", "bias_rate": 0.03}
    (saved, *_) = pool.run(
        fit,
        world_size=4,
        args=(Run(world_size=4, layout={E: 4}, steps=3, save=folder, model=model),),
    )
    world_size, layout = LAYOUTS["p2 v2 e2"]
    run = Run(world_size=world_size, layout=layout, resume=folder, model=model)
    check(pool, alone, run)
    initial = alone(run)["initial"]
    assert initial.keys() == saved["final"].keys()
    assert all(torch.equal(initial[key], value) for key, value in saved["final"].items())
    assert all(value.any() for key, value in initial.items() if key.endswith("bias_nano"))


def test_text_is_written_with_a_cache_as_without() -> None:
    module = LitGPT(
        config_of(Run(model={"capacity_factor": 1.0, "shared_experts": 1, "dense_layers": 1}))
    )
    module.configure_model()
    ids = [3, 4, 5]
    (written,) = generate(module.eval(), [ids], Sampling(temperature=0.0, max_new_tokens=5))
    for _ in range(5):
        ids = [*ids, int(module(torch.tensor([ids]))[0, -1].argmax())]
    assert written == ids[3:]


def test_a_router_without_numbers_is_named() -> None:
    model = GPT(config_of(Run()))
    torch.nn.init.constant_(model.blocks[2].mixture.router.gate.weight, torch.nan)
    with pytest.raises(
        ValueError, match="the router of layer 2 returned 16 weights that are not finite"
    ):
        model(torch.zeros(1, 8, dtype=torch.int64))


def test_a_capacity_over_ranks_that_see_parts_of_a_sequence_is_refused_before_launch() -> None:
    run = Run(world_size=2, layout={C: 2, "start_method": "fork"}, model={"capacity_factor": 1.5})
    with pytest.raises(
        ValueError,
        match=r"capacity_factor=1.5 does not work with context_parallel_size=2.*Use context_parallel_size=1",
    ):
        trainer_of(run).fit(module_of(run), [])


def test_experts_take_the_first_of_a_sequence_that_choose_them() -> None:
    index = torch.tensor([[[0, 1], [0, 2], [0, 1], [3, 0]], [[1, 0], [1, 0], [2, 3], [3, 2]]])
    kept = Capacity(num_experts=4, factor=0.9)(index)  # 0.9 x 2 x 4 / 4: two of each
    assert kept.tolist() == [
        [[True, True], [True, True], [False, True], [True, False]],
        [[True, True], [True, True], [True, True], [True, True]],
    ]


def test_what_is_recomputed_counts_once_and_evaluation_not_at_all() -> None:
    router = Router(config_of(Run(model={"balance": "bias", "capacity_factor": 0.5})))
    x = torch.randn(2, 8, 16, requires_grad=True)
    checkpoint(lambda x: router(x).weights, x, use_reentrant=False).sum().backward()
    assert router.balancer is not None
    assert router.capacity is not None
    assert int(router.balancer.load.sum()) == 2 * 8 * 2
    assert int(router.capacity.dropped) == int((~router(x).kept).sum()) > 0
    router.eval()
    assert router(x).kept is None
    assert int(router.balancer.load.sum()) == 2 * 8 * 2
