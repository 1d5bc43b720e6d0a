"""Check that an optimizer gives the same result on the pieces that a layout makes."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.shims.torch import has_step_hooks

_ELEMENTWISE = frozenset(
    (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    )
)
"""Optimizers of torch that need no trial."""
_RANKS = 2
_SIZES = (36, 40, 2, 2, 2)  # large enough for optimizers that factor large matrices only
_LEARNING_RATE = 1.0  # the group's own may be warming up from zero, or hide a difference
_TOLERANCE = 1e-4
_SCALES = (*([1.0] * 8), 100.0, 0.01, 1.0, 1.0)
"""Sizes of the gradients, step by step: warm-up ends, and clipping takes effect."""


class MixingOptimizerError(PTDPError, ValueError):
    """An optimizer combines elements or parameters that the layout has on several ranks."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A way in which ranks share the tensors of an optimizer.

    Attributes:
        option: The option that causes it, with its value.
        dims: Number of dimensions of the parameters.
        along: The dimension along which the parameters are split; "flat" for ranges of flattened
            ones, "apart" for ranks with different parameters.
    """

    option: str
    dims: int
    along: int | Literal["flat", "apart"]

    def tensors(self, generator: torch.Generator) -> list[Tensor]:
        """Return whole tensors, whose elements grow along each dimension."""
        return [
            self._tensor(generator) * (1 + index)
            for index in range(_RANKS if self.along == "apart" else 1)
        ]

    def _tensor(self, generator: torch.Generator) -> Tensor:
        tensor = torch.randn(_SIZES[: self.dims], generator=generator)
        for dim, size in enumerate(tensor.shape):
            tensor = tensor.transpose(dim, -1).mul(torch.linspace(1, 6, size)).transpose(dim, -1)
        return tensor.contiguous()

    def parts(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the tensors of each rank."""
        if self.along == "apart":
            return [[tensor] for tensor in tensors]
        (tensor,) = tensors
        pieces = (
            tensor.flatten().chunk(_RANKS)
            if self.along == "flat"
            else tensor.chunk(_RANKS, self.along)
        )
        return [[piece] for piece in pieces]


@dataclass(frozen=True, kw_only=True)
class GroupTrial:
    """Facts about one parameter group on which the ranks agree.

    Attributes:
        cuts: How its parameters are shared.
        dims: Numbers of dimensions that its parameters have.
        state: State that the optimizer's constructor creates for a parameter, reduced to one
            element.
    """

    cuts: frozenset[Cut] = frozenset()
    dims: frozenset[int] = frozenset()
    state: Mapping[str, Any] | None = None


def check_elementwise(
    optimizer: Optimizer,
    trials: Sequence[GroupTrial],
    *,
    device: torch.device,
) -> list[int]:
    """Step small tensors as one rank and as several would, and compare the results.

    Optimizers that use rows, columns or norms of a whole matrix, or a norm of all parameters, give
    a different result. An optimizer that cannot be tried causes a warning.

    Args:
        optimizer: The optimizer.
        trials: Facts about its groups.
        device: Device of the tensors.

    Returns:
        Positions of the groups whose parameters must not be cut, because the optimizer combines
        elements of a parameter, as Muon does, but not several parameters.

    Raises:
        MixingOptimizerError: The results differ.
    """
    if type(optimizer) in _ELEMENTWISE and not has_step_hooks(optimizer):
        return []
    tried: dict[str, bool] = {}
    undivided: set[int] = set()
    for position, (group, trial) in enumerate(zip(optimizer.param_groups, trials, strict=True)):
        options = {
            key: bool(value) if isinstance(value, float | Tensor) else value
            for key, value in group.items()
        }
        kind = repr(
            sorted(
                (key, repr(value))
                for key, value in options.items()
                if key not in ("params", "param_names")
            )
        )
        steps = _TrialSteps(
            optimizer=optimizer, group=group, state=trial.state or {}, device=device
        )
        for cut in sorted(trial.cuts, key=repr):
            key = f"{kind}{cut}"
            if key not in tried:
                tried[key] = steps.needs_full_tensor(cut)
            if tried[key]:
                undivided.add(position)
    return sorted(undivided)


@dataclass(frozen=True, kw_only=True)
class _TrialSteps:
    """Steps of one parameter group's optimizer on small tensors.

    Attributes:
        optimizer: The optimizer.
        group: The parameter group.
        state: See ``GroupTrial``.
        device: Device of the tensors.
    """

    optimizer: Optimizer
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    device: torch.device

    def needs_full_tensor(self, cut: Cut) -> bool:
        """Return True if the optimizer works with whole parameters only."""
        try:
            is_tested = self._compare(cut)
        except MixingOptimizerError as error:
            if cut.along != "flat" and not cut.option.startswith("tensor_"):
                raise
            try:
                is_tested = self._compare(replace(cut, along="apart"))
            except MixingOptimizerError:
                raise error from None
            if not is_tested:
                raise
            return True
        if not is_tested:
            warnings.warn(
                f"{type(self.optimizer).__name__} cannot be tested before training. With "
                f"{cut.option}, it must not combine elements of a parameter, or several parameters",
                stacklevel=2,
            )
        return False

    def _compare(self, cut: Cut) -> bool:
        """Compare steps on whole tensors and on their pieces; return False if nothing changes.

        Raises:
            MixingOptimizerError: They differ, or a step fails.
        """
        generator = torch.Generator().manual_seed(0)
        starts, direction = (cut.tensors(generator) for _ in range(2))
        probes: list[Optimizer] = []
        values = starts
        for step in range(len(_SCALES)):
            triples = zip(values, direction, cut.tensors(generator), strict=True)
            gradients = [_gradient(step, *triple) for triple in triples]
            try:
                probes = probes or [self._probe(item) for item in (starts, *cut.parts(starts))]
                values, draws = self._step(probes[0], gradients, seed=step)
            except Exception as error:
                if cut.along == "flat":
                    reason = f"it fails on a small parameter ({error})"
                    raise _refusal(self.optimizer, cut, reason) from error
                return False
            if draws:  # ranks would draw others, in another order
                raise _refusal(self.optimizer, cut, "it draws random numbers")
            if not all(value.isfinite().all() for value in values):
                return False
            try:
                parts = zip(probes[1:], cut.parts(gradients), strict=True)
                results = [self._step(probe, part, seed=step)[0] for probe, part in parts]
            except Exception as error:
                reason = f"it fails on a part of a parameter ({error})"
                raise _refusal(self.optimizer, cut, reason) from error
            difference = max(map(_largest_change, cut.parts(values), results))
            if not difference <= _TOLERANCE * _largest_change(starts, values):
                raise _refusal(
                    self.optimizer,
                    cut,
                    "its update of a part differs from that of the full parameter by up to "
                    f"{difference:.1e}",
                )
        return _largest_change(starts, values) > 0

    def _probe(self, starts: Sequence[Tensor]) -> Optimizer:
        """Return an equivalent optimizer of other tensors with this group's hyperparameters."""
        parameters = [nn.Parameter(start.to(self.device, copy=True)) for start in starts]
        probe = equivalent_optimizer(self.optimizer, self.group, parameters)
        probe.state.update({item: _state_like(item, self.state) for item in parameters})
        options = probe.param_groups[0]
        if "lr" in options:
            options["lr"] = (
                torch.full_like(options["lr"], _LEARNING_RATE)
                if isinstance(options["lr"], Tensor)
                else _LEARNING_RATE
            )
        return probe

    def _step(
        self, probe: Optimizer, gradients: Sequence[Tensor], *, seed: int
    ) -> tuple[list[Tensor], bool]:
        """Step; return the parameters, and whether random numbers were drawn."""
        (group,) = probe.param_groups
        for parameter, gradient in zip(group["params"], gradients, strict=True):
            parameter.grad = gradient.to(self.device, copy=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            probe.step(_closure)
            draws = not torch.equal(before, torch.get_rng_state())
        return [parameter.detach().to("cpu", copy=True) for parameter in group["params"]], draws


def _gradient(step: int, value: Tensor, direction: Tensor, noise: Tensor) -> Tensor:
    """Return a gradient in a lasting direction with noise.

    The first is orthogonal to each row of the parameter, the second to the parameter as a whole,
    because optimizers such as AdamP treat such weights differently (arXiv 2006.08217, section 3.3).
    """
    gradient = _SCALES[step] * (direction + noise)
    if step < 2:
        dims = [*range(1 - step, value.dim())] or [0]
        squares = (value * value).sum(dims, keepdim=True)
        gradient = gradient - value * (gradient * value).sum(dims, keepdim=True) / (squares + 1e-20)
    return gradient


def _largest_change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    return max(float((new - old).abs().max()) for old, new in zip(before, after, strict=True))


def _refusal(optimizer: Optimizer, cut: Cut, reason: str) -> MixingOptimizerError:
    name = type(optimizer).__name__
    field = cut.option.partition("=")[0]
    if cut.along == "apart":
        return MixingOptimizerError(
            f"{cut.option} leaves each rank with some of the parameters, but {name} does not "
            f"update each by itself: {reason}. Use "
            "Trainer(gradient_clip_val=...) instead of clipping in the optimizer, an optimizer "
            f"that updates each parameter separately, or {field}=1"
        )
    remedy = "shard='none'" if cut.along == "flat" else f"{field}=1"
    return MixingOptimizerError(
        f"{cut.option} splits parameters, but {name} does not work element by element: "
        f"{reason}. Use an elementwise optimizer (AdamW, Adam, SGD, RMSprop, ...), or {remedy}"
    )


def equivalent_optimizer(
    optimizer: Optimizer, group: Mapping[str, Any], parameters: Sequence[nn.Parameter]
) -> Optimizer:
    """Return an optimizer of other parameters, without states, with this group's options."""
    probe = object.__new__(type(optimizer))
    # Copy its attributes, except a step that a scheduler has bound to the original, parameters of
    # the model, and containers that the steps would change.
    for key, value in vars(optimizer).items():
        if key != "step" and not (
            isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value)
        ):
            vars(probe)[key] = copy.copy(value) if isinstance(value, dict | list | set) else value
    options = {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "param_names"
    }
    probe.state = defaultdict(dict)
    probe.param_groups = [{**options, "params": list(parameters)}]
    if callable(begin := getattr(probe, "train", None)):
        begin()  # Schedule-Free's optimizers refuse to step before
    return probe


def _closure() -> Any:
    """Return a loss in place of Lightning's closure, which has already been called.

    It is not 0, because some optimizers multiply their step by it."""
    return torch.ones(())


def constructed_state(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state that the optimizer's constructor created for a parameter.

    It is reduced to one element; None if no parameter here has such a state. Adagrad of torch 2.11
    creates a sum. Most optimizers create their states at the first step.
    """
    with_state = [p for p in group["params"] if optimizer.state.get(p) and p.numel()]
    parameter = max(with_state, key=Tensor.dim, default=None)  # one without dimensions shows least
    if parameter is None:
        return None
    return {
        key: value.flatten()[:1].cpu()
        if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape
        else value
        for key, value in optimizer.state[parameter].items()
    }


def _state_like(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.to(parameter.device).expand(parameter.numel()).view_as(parameter).clone()
        if isinstance(value, Tensor) and value.dim()
        else copy.copy(value)
        for key, value in state.items()
    }
