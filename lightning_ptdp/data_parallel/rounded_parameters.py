"""Weights that replicas gather in float8, because only float8 products read them.

Each replica rounds its own part and sends one byte per element. All use the scale of the whole
weight, so the gathered values are those to which one process rounds it. torchao and FSDP2 gather
in the same way (``enable_fsdp_float8_all_gather``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ptdp.data_parallel.flat_parameters import FlatParameters, ParameterState, parts_of
from lightning_ptdp.data_parallel.reduction import PendingReduction
from lightning_ptdp.parameters.rounded_weight import RoundedWeight
from lightning_ptdp.shims.quantization import rounded_weight, weight_scale


class RoundedParameters:
    """The parameters of a flat tensor in float8.

    Args:
        flat: The parameters.
        weights: Receive the gathered values.

    Attributes:
        flat: The parameters.
        whole: (n,) float8; None while it is freed.
        state: State of the values.
    """

    def __init__(self, flat: FlatParameters, weights: Mapping[nn.Parameter, RoundedWeight]) -> None:
        self.flat = flat
        self.whole: Tensor | None = None
        self.state = ParameterState.SHARDED
        self._weights = [weights[managed.parameter] for managed in flat.parameters]
        self._recipe = self._weights[0].recipe
        self._pending: PendingReduction | None = None

    @torch.no_grad()
    def largest(self) -> Tensor:
        """Return the largest magnitude in this rank's part of each parameter, (k) float32."""
        self.flat.settled()
        found = self.flat.own.new_zeros(len(self._weights), dtype=torch.float32)
        places = {managed: place for place, managed in enumerate(self.flat.parameters)}
        for managed, _, values in self.flat.own_parts():
            found[places[managed]] = values.abs().amax()
        return found

    def rescale(self, largest: Tensor) -> None:
        """Round from now on with the scales for these largest magnitudes of whole parameters."""
        scales = weight_scale(largest, self._recipe)
        for weight, scale in zip(self._weights, scales.unbind(), strict=True):
            weight.scale = scale

    def use(self, used: bool) -> None:
        """Let products use these values, or round the weights themselves."""
        for weight in self._weights:
            weight.used = used

    @torch.no_grad()
    def start_gather(self) -> None:
        """Start to gather the values, if they are missing; collective."""
        if self.state is not ParameterState.SHARDED:
            return
        self.state = self.state.to(ParameterState.GATHERING)
        flat = self.flat
        flat.settled()
        self.whole = torch.empty(flat.size, dtype=torch.uint8, device=flat.own.device)
        mine = flat.reduction.mine(self.whole)
        stop = flat.begin + flat.own.numel()
        weights = dict(zip(flat.parameters, self._weights, strict=True))
        for managed, _, region in parts_of(
            flat.parameters, flat.offsets, flat.begin, stop, first=False
        ):
            scale = weights[managed].scale
            assert scale is not None
            rounded = rounded_weight(flat.at(region), scale, self._recipe)
            mine[region.start - flat.begin : region.stop - flat.begin] = rounded.view(torch.uint8)
        self._pending = flat.reduction.start_gather(self.whole)

    def wait(self) -> None:
        """Return when the values are whole; on CUDA, when the current stream waits for it."""
        self.start_gather()
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        pending.wait()
        assert self.whole is not None
        self.whole = self.whole.view(self._recipe.config.cast_config_weight.target_dtype)
        for weight, view in zip(self._weights, self.flat.views(self.whole), strict=True):
            weight.values = view
        self.state = self.state.to(ParameterState.WHOLE)

    def free(self) -> None:
        """Free the values; a graph that has saved them keeps its own reference."""
        if self.state is ParameterState.GATHERING:
            self.wait()  # memory that a message is written to cannot be given away
        if self.state is ParameterState.WHOLE:
            self.state = self.state.to(ParameterState.SHARDED)
            self.whole = None
            for weight in self._weights:
                weight.values = None


def agree_on_scales(rounded: Sequence[RoundedParameters]) -> None:
    """Scale parameters by their largest magnitudes over the replicas; collective.

    There is one reduction for all parameters that the same ranks share.
    """
    shared: dict[tuple[int, ...], list[RoundedParameters]] = {}
    for parameters in rounded:
        shared.setdefault(parameters.flat.reduction.inner.ranks, []).append(parameters)
    for alike in shared.values():
        parts = [parameters.largest() for parameters in alike]
        largest = torch.cat(parts)
        group = alike[0].flat.reduction.inner
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group.handle)
        for parameters, values in zip(
            alike, largest.split([part.numel() for part in parts]), strict=True
        ):
            parameters.rescale(values)
