"""Our GPT with experts in every layout, with router losses, router bias and capacity."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from lightning_ptdp import ParallelPlan, PTDPStrategy, Sampling, generate
from lightning_ptdp.models import GPT, LitGPT
from lightning_ptdp.models.experts import ExpertWeights, Router, within_capacity
from lightning_ptdp.models.memory_saving import swiglu
from tests.expert_parallel import toy
from tests.expert_parallel.own import Run, config_of
from tests.letters import ET, SP, C, E, M, P, T, V, Z
from tests.parity import assert_weights_near, fit

pytestmark = pytest.mark.thorough

LAYOUTS = {
    "e2": (2, {E: 2}),
    "e4 m2": (4, {E: 4, M: 2}),
    "t2 e2": (4, {T: 2, E: 2}),
    "p2": (2, {P: 2, M: 2}),
    "p2 v2 e2": (4, {P: 2, V: 2, E: 2, M: 2}),
    "p2 e2 zb_h1 recompute": (4, {P: 2, E: 2, M: 2, "schedule": "zb_h1", "recompute": "full"}),
    "d2 e2 zero": (4, {E: 2, Z: "optimizer"}),
    "d2 e2 sharded gradients": (4, {E: 2, Z: "gradients", M: 2}),
    "d2 e2 sharded parameters": (4, {E: 2, Z: "parameters", M: 2}),
    "c2 e2": (2, {C: 2, E: 2}),
    "t2 et2": (2, {T: 2, ET: 2}),
    "t2 et2 e2 p2 sp": (8, {T: 2, ET: 2, E: 2, P: 2, M: 2, SP: True}),
    "t2 et2 e2 zero recompute": (4, {T: 2, ET: 2, E: 2, Z: "optimizer", "recompute": "full"}),
    "t2 sp c2 e2": (4, {T: 2, SP: True, C: 2, E: 2}),
}


MODEL = {"shared_experts": 1, "dense_layers": 1}


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_equal_single_process(name, parity):
    parity.check(Run(model=MODEL), LAYOUTS[name])


@pytest.mark.parametrize(
    ("name", "score"),
    [("e4", "sigmoid"), ("p2 e2 zb_h1 recompute", "sigmoid"), ("t2 sp c2 e2", "softmax")],
)
def test_router_bias_update_equals_single_process(name, score, parity):
    model = {**MODEL, "balance": "bias", "bias_rate": 0.03, "router_score": score}
    run, place = Run(model=model), {**LAYOUTS, "e4": (4, {E: 4})}[name]
    if name == "e4":  # one validation is between the two batches of a step
        run = replace(run, accumulate=2, steps=6, global_batch=4, validate_every=5)
    found, *_ = parity.check(run, place)
    biases = [value for key, value in found["final"].items() if key.endswith("bias_nano")]
    assert len(biases) == 3
    assert all(value.any() for value in biases)


@pytest.mark.parametrize(("name", "balance"), [("c2 e2", "loss"), ("p2 v2 e2", "bias")])
def test_user_module_equals_single_process(name, balance, parity):
    parity.check(Run(model={"balance": balance}, usual=True), LAYOUTS[name])


@pytest.mark.parametrize("name", ["e2", "t2 e2"])
def test_capacity_drops_equal_single_process(name, parity):
    run = Run(model={"capacity_factor": 1.0})
    parity.check(run, LAYOUTS[name])
    logged = parity.result(run)["logged"]
    assert all(0 < step["train_dropped_share"] < 0.5 for step in logged)


@pytest.mark.parametrize(
    "place",
    [LAYOUTS["e2"], LAYOUTS["t2 et2"], (4, {T: 2, ET: 2, E: 2})],
    ids=["e2", "t2 et2", "t2 et2 e2"],
)
def test_rank_holds_its_shard_of_experts_and_their_states(place, parity):
    run = Run(steps=2)
    whole = parity.result(run)["held"]
    assert whole["states"] == 2 * whole["parameters"] == 2 * whole["gradients"]
    for found in parity.ranks(run.on(place)):
        assert {what: place[0] * number for what, number in found["held"].items()} == whole


def test_checkpoint_of_split_experts_resumes_in_other_layout(parity, tmp_path):
    folder, place = str(tmp_path / "split.ckpt"), (4, {T: 2, ET: 2, E: 2})
    saved, *_ = parity.ranks(Run(steps=2, save=folder).on(place))
    found, *_ = parity.check(Run(resume=folder), place)
    assert_weights_near(found["initial"], saved["final"], tolerance=0)


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
def test_invalid_expert_tensor_parallel_size_is_refused(layout, said):
    with pytest.raises(ValueError, match=said):
        PTDPStrategy(**layout)


def test_unsplittable_experts_are_refused_before_launch():
    layout = {T: 2, ET: 2, "start_method": "fork"}
    with pytest.raises(
        ValueError,
        match=r"inner width of an expert=9 .* expert_tensor_parallel_size=2. Sizes that work: "
        r"\[1, 3, 9\]",
    ):
        fit(0, Run(model={"expert_hidden_size": 9}).on((2, layout)))
    plan = ParallelPlan(tensor={"layers.*.experts": "experts"})
    with pytest.raises(
        ValueError,
        match=r"'layers.0.experts': expert_tensor_parallel_size=2 .* Experts does not have",
    ):
        fit(0, toy.Run().on((2, layout | {"plan": plan})))


def test_checkpoint_resumes_in_other_layout(parity, tmp_path):
    folder, model = str(tmp_path / "four.ckpt"), {"balance": "bias", "bias_rate": 0.03}
    saved, *_ = parity.ranks(Run(steps=2, save=folder, model=model).on((4, {E: 4})))
    found, *_ = parity.check(Run(resume=folder, model=model), LAYOUTS["p2 v2 e2"])
    initial = found["initial"]
    assert_weights_near(initial, saved["final"], tolerance=0)
    assert all(value.any() for key, value in initial.items() if key.endswith("bias_nano"))


def test_generation_is_equal_with_and_without_cache():
    module = LitGPT(
        config_of(Run(model={"capacity_factor": 1.0, "shared_experts": 1, "dense_layers": 1}))
    )
    module.configure_model()
    ids = [3, 4, 5]
    (written,) = generate(module.eval(), [ids], Sampling(temperature=0.0, max_new_tokens=5))
    for _ in range(5):
        ids = [*ids, int(module(torch.tensor([ids]))[0, -1].argmax())]
    assert written == ids[3:]


def test_router_with_nan_weights_is_named():
    model = GPT(config_of(Run()))
    torch.nn.init.constant_(model.blocks[2].mixture.router.gate.weight, torch.nan)
    with pytest.raises(
        ValueError, match="the router of layer 2 returned 16 weights that are not finite"
    ):
        model(torch.zeros(1, 8, dtype=torch.int64))


def test_capacity_with_context_parallel_is_refused_before_launch():
    run = Run(world_size=2, layout={C: 2, "start_method": "fork"}, model={"capacity_factor": 1.5})
    with pytest.raises(
        ValueError,
        match=r"capacity_factor=1.5 does not work with context_parallel_size=2.*Use context_parallel_size=1",
    ):
        fit(0, run)


def test_capacity_keeps_first_tokens_of_each_sequence():
    index = torch.tensor([[[0, 1], [0, 2], [0, 1], [3, 0]], [[1, 0], [1, 0], [2, 3], [3, 2]]])
    kept = within_capacity(index, num_experts=4, factor=0.9)  # 0.9 x 2 x 4 / 4: two of each
    assert kept.tolist() == [
        [[True, True], [True, True], [False, True], [True, False]],
        [[True, True], [True, True], [True, True], [True, True]],
    ]


def test_dropped_choices_add_nothing_to_output_and_gradients():
    torch.manual_seed(3)
    experts = ExpertWeights(config_of(Run()), layer=0).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(6, experts.gate_up_proj.size(2), dtype=torch.float64, requires_grad=True)
    index = torch.stack([torch.randperm(experts.num_experts)[:2] for _ in range(6)])
    weights = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)
    kept = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1], [0, 1], [1, 1]], dtype=torch.bool)
    inputs = [x, weights, *experts.parameters()]
    found = experts(x, index, weights, kept_nk=kept)
    expected = torch.zeros_like(x)
    for token, choice in kept.nonzero().tolist():
        expert = index[token, choice]
        hidden = swiglu(x[token] @ experts.gate_up_proj[expert].T)
        row = weights[token, choice] * (hidden @ experts.down_proj[expert].T)
        expected = expected.index_add(0, torch.tensor([token]), row[None])
    grad = torch.randn_like(x)
    assert_close(found, expected)
    assert_close(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad)
    )
    wrong = x.detach().index_fill(0, torch.tensor([2]), torch.inf)
    assert_close(experts(wrong, index, weights, kept_nk=kept), expected)


def test_router_counts_recomputed_tokens_once_and_skips_eval():
    router = Router(config_of(Run(model={"balance": "bias", "capacity_factor": 0.5})))
    x = torch.randn(2, 8, 16, requires_grad=True)
    checkpoint(lambda x: router(x).weights, x, use_reentrant=False).sum().backward()
    assert int(router.balancer.load.sum()) == 2 * 8 * 2
    assert not router(x).kept.all()
    router.eval()
    assert router(x).kept is None
    assert int(router.balancer.load.sum()) == 2 * 8 * 2
