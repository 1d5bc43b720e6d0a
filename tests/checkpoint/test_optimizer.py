"""Optimizer state saved in one layout and resumed in another, against a reference run."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.checkpoint import (
    CheckpointError,
    load_indexed_optimizer,
    load_optimizer,
    merge_groups,
    optimizer_groups,
    optimizer_tensors,
    read_metadata,
    read_state,
    save_checkpoint,
)
from lightning_ptdp.parameters.placement import Placement
from tests.checkpoint.layouts import Layout, held, save
from tests.fake_cuda import fake_cuda

Parameters = dict[str, tuple[torch.nn.Parameter, Placement]]


def _parameters(layout, rank):
    """Return this rank's float32 parameters by global name, with zero padding."""
    found = {}
    for name, (tensor, sharding) in held(layout, rank).items():
        if tensor.dtype == torch.float32 and tensor.numel():
            found[name.removeprefix("model/")] = (
                torch.nn.Parameter(_local(tensor.double() / 100, sharding)),
                sharding,
            )
    return found


def _local(tensor, sharding):
    """Return a float32 copy with zeros outside every piece."""
    local = torch.zeros(tensor.shape)
    for piece in sharding.pieces:
        cut = tuple(
            slice(start, start + extent)
            for start, extent in zip(piece.local, piece.size, strict=True)
        )
        local[cut] = tensor[cut].float()
    return local


def _optimizer(parameters, kind, *, lr=0.1):
    """Return an optimizer with two weight decay groups. One may be empty on a stage."""
    groups = [
        {
            "params": [p for p, s in parameters.values() if (len(s.full_shape) > 1) == matrix],
            "weight_decay": 0.1 * matrix,
        }
        for matrix in (True, False)
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    return torch.optim.AdamW(
        groups, lr=lr, betas=(0.8, 0.9), amsgrad=True, foreach=kind == "foreach"
    )


def _train(parameters, optimizer, *, start, steps):
    """Train with gradients that depend only on element and step, to be equal in every layout."""
    for step in range(start, start + steps):
        for parameter, _ in parameters.values():
            parameter.grad = torch.cos(parameter.detach() * 3 + step) * (parameter.detach() != 0)
        optimizer.step()


def _all_groups(optimizer, parameters):
    mine = optimizer_groups(optimizer, {p: name for name, (p, _) in parameters.items()})
    if not dist.is_initialized():
        return merge_groups([mine])
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return merge_groups(everyone)


def _named(parameters):
    """Return the names and placements of parameters."""
    return {
        "names": {p: name for name, (p, _) in parameters.items()},
        "placements": {name: sharding for name, (_, sharding) in parameters.items()},
    }


def _save(rank, layout, kind, path):
    parameters = _parameters(layout, rank)
    optimizer = _optimizer(parameters, kind)
    _train(parameters, optimizer, start=0, steps=3)
    tensors = {f"model/{name}": value for name, value in parameters.items()}
    tensors |= optimizer_tensors(optimizer, **_named(parameters))
    save_checkpoint(
        path, tensors=tensors, state={"groups": _all_groups(optimizer, parameters)}, metadata={}
    )


def _resume(rank, layout, kind, path):
    """Resume for two steps; compare state and parameters with a five-step reference run."""
    parameters = _parameters(layout, rank)
    expected = _parameters(layout, rank)
    reference = _optimizer(expected, kind)
    _train(expected, reference, start=0, steps=3)
    with torch.no_grad():
        for name, (parameter, _) in parameters.items():
            parameter.copy_(expected[name][0])
    optimizer = _optimizer(parameters, kind, lr=7.0)
    load_optimizer(path, optimizer, **_named(parameters), groups=read_state(path)["groups"])
    for name, (parameter, _) in parameters.items():
        found, wanted = optimizer.state[parameter], reference.state[expected[name][0]]
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(found[key], value), f"{key} of {name}"
            assert found[key].dtype == value.dtype
    for group, wanted in zip(optimizer.param_groups, reference.param_groups, strict=True):
        assert {**group, "params": []} == {**wanted, "params": []}
    _train(parameters, optimizer, start=3, steps=2)
    _train(expected, reference, start=3, steps=2)
    for name, (parameter, _) in parameters.items():
        assert torch.equal(parameter, expected[name][0]), name


@pytest.mark.parametrize(
    ("kind", "saved", "loaded"),
    [
        ("adamw", Layout(2, t=2), [Layout(1), Layout(4, t=4), Layout(4, t=2, p=2)]),
        ("foreach", Layout(4, t=2, p=2), [Layout(2, t=2), Layout(1)]),
        ("sgd", Layout(1), [Layout(2, p=2)]),
    ],
)
def test_optimizer_resumes_in_other_layout(pool, tmp_path, kind, saved, loaded):
    path = str(tmp_path / "c")
    pool.run(_save, world_size=saved.world, args=(saved, kind, path))
    for layout in loaded:
        pool.run(_resume, world_size=layout.world, args=(layout, kind, path))


class Counting(torch.optim.Optimizer):
    """User optimizer whose state holds an int, a float, a flag and None."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.update(
                    step=state.get("step", 0) + 1,
                    scale=0.1,
                    warm=True,
                    nothing=None,
                    mean=parameter.detach() * 2,
                )


def _one(tensor):
    """Return the name and placement of a new parameter, and the parameter."""
    parameter = torch.nn.Parameter(tensor)
    return _named({"w": (parameter, Placement.replicated(tuple(tensor.shape)))}), parameter


def test_scalar_optimizer_state_keeps_its_types(tmp_path):
    named, parameter = _one(torch.ones(2, 3))
    optimizer = Counting([parameter])
    optimizer.step()
    optimizer.step()
    expected = copy.copy(optimizer.state[parameter])
    tensors = optimizer_tensors(optimizer, **named, index=1)
    save_checkpoint(tmp_path / "c", tensors=tensors, state={}, metadata={})
    assert "optimizer/1/step:number/w" in read_metadata(tmp_path / "c").tensors
    groups = optimizer_groups(optimizer, named["names"])
    load_optimizer(tmp_path / "c", optimizer, **named, groups=groups, index=1)
    found = optimizer.state[parameter]
    assert (found["step"], found["scale"], found["warm"]) == (2, 0.1, True)
    assert [type(found[key]) for key in ("step", "scale", "warm")] == [int, float, bool]
    assert torch.equal(found["mean"], expected["mean"])
    assert "nothing" not in found


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("loaded", [torch.bfloat16, torch.float32])
def test_states_follow_the_dtype_of_their_parameter(saved, loaded, master, tmp_path):
    """States in another dtype than that of the parameter are the optimizer's choice."""
    named, parameter = _one(torch.ones(2, 3, dtype=saved))
    own = torch.float64
    states = {"mean": torch.rand(2, 3).to(saved), "own": torch.rand(2, 3, dtype=own)}
    if master:
        states = {"mean": torch.rand(2, 3), "own": torch.rand(2, 3).bfloat16()}
        states["master"] = torch.rand(2, 3)
        own = torch.bfloat16
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = states
    place = named["placements"]["w"]
    tensors = {"model/w": (parameter.detach(), place), **optimizer_tensors(optimizer, **named)}
    save_checkpoint(tmp_path / "c", tensors=tensors, state={}, metadata={})
    groups = optimizer_groups(optimizer, named["names"])
    named, parameter = _one(torch.ones(2, 3, dtype=loaded))
    other = torch.optim.SGD([parameter], lr=0.1)
    load_optimizer(tmp_path / "c", other, **named, groups=groups)
    found = other.state[parameter]
    assert (found["mean"].dtype, found["own"].dtype) == (loaded, own)
    for key, value in states.items():
        assert torch.equal(found[key], value.to(found[key].dtype))


def test_states_of_single_file_get_the_dtype_of_their_parameter():
    """Its states were those of weights in bfloat16, without copies in float32."""
    named, parameter = _one(torch.ones(2, 3))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    mean, step = torch.rand(2, 3).bfloat16(), torch.tensor(2.0)
    state = {**optimizer.state_dict(), "state": {0: {"exp_avg": mean, "step": step}}}
    load_indexed_optimizer(state, optimizer, **named, of_groups=[["w"]])
    found = optimizer.state[parameter]
    assert found["exp_avg"].dtype == found["step"].dtype == torch.float32
    assert torch.equal(found["exp_avg"], mean.float())


def test_unreadable_state_of_single_file_is_refused():
    named, parameter = _one(torch.ones(2, 3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    state = optimizer.state_dict()
    load_indexed_optimizer(
        {**state, "state": {0: {"none": None}}}, optimizer, **named, of_groups=["w"]
    )
    state["state"] = {0: {"blocks": [torch.ones(2)]}}
    with pytest.raises(CheckpointError, match=r"has the state 'blocks' of 'w', which is a list"):
        load_indexed_optimizer(state, optimizer, **named, of_groups=["w"])


def test_tensor_learning_rate_is_restored_in_place(tmp_path):
    named, parameter = _one(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.5))
    tensors = optimizer_tensors(optimizer, **named)
    state = {"groups": optimizer_groups(optimizer, named["names"])}
    save_checkpoint(tmp_path / "c", tensors=tensors, state=state, metadata={})
    groups = read_state(tmp_path / "c")["groups"]
    rate = torch.tensor(0.0)
    other = torch.optim.Adam([parameter], lr=rate)
    load_optimizer(tmp_path / "c", other, **named, groups=groups)
    assert other.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
    plain = torch.optim.Adam([parameter], lr=0.1)
    load_optimizer(tmp_path / "c", plain, **named, groups=groups)
    assert plain.param_groups[0]["lr"] == 0.5
    assert isinstance(plain.param_groups[0]["lr"], float)


def test_tensor_learning_rates_of_all_gpus_are_comparable():
    """A rank would compare its own with those on the other GPUs, which are pickled with them."""
    with fake_cuda(1):
        named, parameter = _one(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=torch.tensor(0.5).cuda())
        (group,) = optimizer_groups(optimizer, named["names"])
        assert optimizer.param_groups[0]["lr"].is_cuda
        assert group["lr"].is_cpu


def test_foreach_option_is_not_restored(tmp_path):
    named, parameter = _one(torch.ones(2))
    path = save(tmp_path / "c")
    groups = optimizer_groups(torch.optim.AdamW([parameter], lr=0.5, foreach=True), named["names"])
    optimizer = torch.optim.AdamW([parameter], lr=0.1, foreach=False)
    load_optimizer(path, optimizer, **named, groups=groups)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["foreach"]) == (0.5, False)


def test_states_of_rows_and_columns_belong_to_whole_parameters(tmp_path):
    """Adafactor keeps a mean for each row and each column, which no part of a matrix has."""
    named, parameter = _one(torch.ones(4, 6))
    optimizer = torch.optim.Adafactor([parameter])
    parameter.grad = torch.rand(4, 6)
    optimizer.step()
    tensors = optimizer_tensors(optimizer, **named)
    save_checkpoint(tmp_path / "c", tensors=tensors, state={}, metadata={})
    groups = optimizer_groups(optimizer, named["names"])
    other = torch.optim.Adafactor([parameter])
    load_optimizer(tmp_path / "c", other, **named, groups=groups)
    states, expected = other.state[parameter], optimizer.state[parameter]
    assert states.keys() == expected.keys() > {"row_var", "col_var"}
    assert all(torch.equal(states[key], value) for key, value in expected.items())

    named["placements"] = {"w": Placement.replicated((4, 6)).flattened(0, 12)}
    with pytest.raises(
        CheckpointError,
        match=r"Adafactor cannot be checkpointed: its state '\w+' of 'w' has the shape \(4, 1\)",
    ):
        optimizer_tensors(optimizer, **named)
    with pytest.raises(CheckpointError, match=r"of 'w' has the shape \(\d, \d\) in the checkpoint"):
        load_optimizer(tmp_path / "c", other, **named, groups=groups)


def test_layout_dependent_optimizer_state_is_refused():
    named, parameter = _one(torch.ones(4, 6))
    parameter.grad = torch.ones(4, 6)
    lbfgs = torch.optim.LBFGS([parameter])
    lbfgs.step(lambda: (parameter**2).sum())
    with pytest.raises(
        CheckpointError,
        match=r"LBFGS cannot be checkpointed: its state '\w+' of 'w' (is a|has the shape)",
    ):
        optimizer_tensors(lbfgs, **named)
    with pytest.raises(
        CheckpointError, match=r"a parameter of shape \(3,\) that is not in the model"
    ):
        optimizer_groups(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))]), named["names"])


def test_parameter_groups_are_merged_over_stages():
    first = [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.2, "params": []}]
    second = [{"lr": 0.1, "params": ["c", "a"]}, {"lr": 0.2, "params": ["d"]}]
    assert merge_groups([first, second]) == [
        {"lr": 0.1, "params": ["a", "b", "c"]},
        {"lr": 0.2, "params": ["d"]},
    ]
    with pytest.raises(
        CheckpointError, match=r"parameter group 1 has lr=0.2 on rank 0, but 0.3 on rank 1"
    ):
        merge_groups([first, [second[0], {"lr": 0.3, "params": []}]])
    with pytest.raises(CheckpointError, match="2 parameter groups on rank 0, but 1 on rank 1"):
        merge_groups([first, second[:1]])


def test_mismatched_groups_leave_optimizer_unchanged(tmp_path):
    named, parameter = _one(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(2)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    tensors = optimizer_tensors(optimizer, **named)
    save_checkpoint(tmp_path / "c", tensors=tensors, state={}, metadata={})
    other = {"names": {parameter: "v"}, "placements": {"v": named["placements"]["w"]}}
    for given, groups, words in (
        (named, [], "has 1 parameter groups, but the checkpoint's has 0"),
        (
            named,
            [{"params": ["v"]}],
            "'w' is in parameter group 0 of this optimizer, but in no group",
        ),
        (
            other,
            [{"params": ["v"]}],
            "'optimizer/0/momentum_buffer/w' is in the checkpoint but not in the model",
        ),
    ):
        with pytest.raises(CheckpointError, match=words):
            load_optimizer(tmp_path / "c", optimizer, **given, groups=groups)
    assert str(optimizer.state_dict()) == str(before)
