"""Trial of optimizers on parts of parameters: elementwise ones pass, others are refused."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ptdp.data_parallel import (
    Cut,
    GroupTrial,
    MixingOptimizerError,
    check_elementwise,
    constructed_state,
    elementwise,
)
from lightning_ptdp.data_parallel.elementwise import equivalent_optimizer
from tests.data_parallel.optimizers import OPTIMIZERS

FLAT = Cut(option="shard='optimizer'", dims=2, along="flat")
ROWS = Cut(option="tensor_parallel_size=2", dims=2, along=0)
COLUMNS = Cut(option="tensor_parallel_size=2", dims=2, along=1)
EXPERTS = Cut(option="expert_parallel_size=2", dims=3, along=0)
STAGES = Cut(option="pipeline_parallel_size=2", dims=2, along="apart")
ALL = (FLAT, ROWS, COLUMNS, EXPERTS, STAGES)


class _Custom(Optimizer):
    """An optimizer whose ``update(parameter, gradient)`` returns the step of a parameter."""

    update: Any

    def __init__(self, parameters: Any, lr: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * self.update(parameter, parameter.grad))


class Lion(_Custom):
    def update(self, parameter, gradient):
        average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
        direction = (0.9 * average + 0.1 * gradient).sign()
        average.mul_(0.99).add_(gradient, alpha=0.01)
        return direction + 0.1 * parameter


class Lars(_Custom):
    def update(self, parameter, gradient):
        return gradient * (parameter.norm() / gradient.norm())


class Lamb(_Custom):
    def update(self, parameter, gradient):
        direction = gradient / (gradient.abs() + 1e-6) + 0.01 * parameter
        return direction * (parameter.norm() / direction.norm()).clamp(max=10)


class Cautious(_Custom):
    """Skips elements whose average gradient has another sign (arXiv 2411.16085)."""

    def update(self, parameter, gradient):
        average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
        average.lerp_(gradient, 0.1)
        mask = average * gradient > 0
        return average * mask / mask.float().mean()


class LargeRows(_Custom):
    """Scales the rows and columns of large matrices."""

    def update(self, parameter, gradient):
        if gradient.dim() < 2 or min(gradient.shape[-2:]) < 16:
            return gradient
        sizes = gradient.abs()
        return gradient / (sizes.mean(-2, keepdim=True) + sizes.mean(-1, keepdim=True))


class Stable(_Custom):
    """Clips the root mean square of updates (arXiv 2304.13013)."""

    def update(self, parameter, gradient):
        squares = self.state[parameter].setdefault("squares", gradient.square())
        squares.lerp_(gradient.square(), 0.01)
        update = gradient / squares.sqrt()
        return update / update.square().mean().sqrt().clamp(min=1)


class WarmingUp(_Custom):
    """Does not step at first."""

    def update(self, parameter, gradient):
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        return gradient / gradient.norm() if state["step"] > 5 else 0 * gradient


class Projecting(_Custom):
    """Removes the part along the parameter, if the gradient has almost none."""

    def update(self, parameter, gradient):
        average = self.state[parameter].setdefault("average", torch.ones_like(parameter))
        average.lerp_(gradient, 0.1)
        cosine = nn.functional.cosine_similarity(gradient.flatten(), parameter.flatten(), dim=0)
        if cosine.abs() > 1e-3:
            return average
        return average - parameter * (average * parameter).sum() / parameter.square().sum()


class Adapting(Optimizer):
    """Estimates the distance to the solution from all parameters (arXiv 2306.06101)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0, "d": 1e-6})

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        product = total = 0.0
        for parameter in group["params"]:
            state = self.state[parameter]
            start = state.setdefault("start", parameter.clone())
            size = state.setdefault("size", torch.zeros_like(parameter))
            product += float((parameter.grad * (start - parameter)).sum())
            total += float(size.add_(parameter.grad.abs()).sum())
        group["d"] = max(group["d"], product / total)
        for parameter in group["params"]:
            parameter.sub_(group["lr"] * group["d"] * parameter.grad.sign())


class Polyak(_Custom):
    """Steps by the loss divided by the squared norm of all gradients (arXiv 1906.05661)."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        square = sum(float(p.grad.square().sum()) for p in parameters)
        for parameter in parameters:
            parameter.sub_(loss / square * parameter.grad)


class Noisy(_Custom):
    """Adds small random numbers."""

    def update(self, parameter, gradient):
        return gradient + 1e-6 * torch.randn_like(gradient)


class Clipping(torch.optim.SGD):
    """Clips by the norm of all its parameters."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class Wrapped(Optimizer):
    """Wraps another optimizer, which does not step the parameters of the trial."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        super().__init__(self.inner.param_groups[0]["params"], {})

    def step(self, closure=None):
        return self.inner.step(closure)


ELEMENTWISE = OPTIMIZERS | {
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "lion": Lion,
}
MIXING = [
    (torch.optim.Adafactor, EXPERTS, "expert_parallel_size=1"),
    (torch.optim.LBFGS, FLAT, "it fails on a small parameter"),
    *((Clipping, cut, "differs from that of the full parameter") for cut in (FLAT, ROWS, COLUMNS)),
    (Clipping, STAGES, "Trainer(gradient_clip_val=...)"),
    *((Adapting, cut, "differs") for cut in ALL),
    *((Polyak, cut, "differs") for cut in ALL),
    *((Noisy, cut, "it draws random numbers") for cut in ALL),
]


def check(make, *cuts, whole=False):
    optimizer = make([nn.Parameter(torch.ones(3, 3))])
    optimizer.register_step_post_hook(lambda *_: None)  # those of torch are tried, too
    kept = dict(optimizer.state)
    state = constructed_state(optimizer, optimizer.param_groups[0])
    groups = [GroupTrial(cuts=frozenset(cuts), state=state)]
    found = check_elementwise(optimizer, groups, device=torch.device("cpu"))
    assert found == ([0] if whole else [])
    assert optimizer.state == kept, "the trial changed the optimizer state"
    return optimizer


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.filterwarnings("error")
def test_elementwise_optimizers_pass_in_every_layout(name):
    check(ELEMENTWISE[name], *ALL)


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.Muon,
        torch.optim.Adafactor,
        Lars,
        Lamb,
        Cautious,
        LargeRows,
        Stable,
        WarmingUp,
        Projecting,
    ],
)
@pytest.mark.filterwarnings("error")
def test_matrix_optimizers_pass_if_matrices_stay_whole(kind):
    check(kind, STAGES)
    for cut in (FLAT, ROWS, COLUMNS):
        check(kind, STAGES, cut, whole=True)


@pytest.mark.parametrize("clips", [False, True])
def test_optimizers_of_torch_are_tried_only_with_hooks(clips):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3, 3))], lr=0.1)
    if clips:
        optimizer.register_step_pre_hook(
            lambda stepping, *_: nn.utils.clip_grad_norm_(stepping.param_groups[0]["params"], 1.0)
        )
    trial = GroupTrial(cuts=frozenset({FLAT}))
    with (
        mock.patch.object(elementwise, "equivalent_optimizer", wraps=equivalent_optimizer) as made,
        pytest.raises(MixingOptimizerError) if clips else contextlib.nullcontext(),
    ):
        check_elementwise(optimizer, [trial], device=torch.device("cpu"))
    assert made.called == clips


@pytest.mark.parametrize(("kind", "cut", "words"), MIXING)
def test_non_elementwise_optimizers_are_refused(kind, cut, words):
    with pytest.raises(MixingOptimizerError) as error:
        check(kind, cut)
    for text in (kind.__name__, cut.option, words):
        assert text in str(error.value)


def test_untestable_optimizer_warns():
    with pytest.warns(UserWarning, match=r"Wrapped cannot be tested.*tensor_parallel_size=2"):
        check(Wrapped, ROWS)


def test_non_elementwise_optimizer_is_detected_at_zero_lr():
    def make(parameters):
        optimizer = torch.optim.Adafactor(parameters, lr=1e-7)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
        return optimizer

    check(make, ROWS, whole=True)


class _Counting(torch.optim.SGD):
    """SGD that notes its steps in a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps = []

    def step(self, closure=None):
        self.steps.append(len(self.steps))
        return super().step(closure)


def test_trial_does_not_change_lists_of_optimizer():
    optimizer = _Counting([nn.Parameter(torch.ones(4, 4))])
    trial = GroupTrial(cuts=frozenset({FLAT}))
    assert check_elementwise(optimizer, [trial], device=torch.device("cpu")) == []
    assert optimizer.steps == []
