"""Keyed dropout, in place of torch's dropout for the duration of a forward.

The key of an element consists of the run's seed and the step, its sample, the calling module and
the number of its earlier dropouts in this call, and the element's position in the full activation.
This rank may hold a part of the activation::

    activation                      dimension 1         last dimension
    (b, ..., h)  hidden state       sequence positions  channels; from r h on after a column layer
    (b, n, s, s) attention weights  heads, from r n on  keys; dimension 2: query positions

Shapes: b samples, s tokens, h channels, n heads, r this rank in the tensor group.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.attention import KeyedAttention, intercepted, positions
from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.base.nested import batch_size, iterate_tensors
from lightning_ptdp.base.random import derive_seed
from lightning_ptdp.base.torch_calls import Replacing
from lightning_ptdp.context_parallel import sequence_length
from lightning_ptdp.forward.surroundings import Context, Contexts, Forward, Surrounding
from lightning_ptdp.shims.torch import is_recomputed_later
from lightning_ptdp.tensor_parallel import give_randomness
from lightning_ptdp.world.mesh import Group

_UNSUPPORTED: Mapping[Callable[..., object], str] = MappingProxyType(
    {
        F.alpha_dropout: "alpha_dropout",
        F.dropout1d: "dropout1d",
        F.dropout2d: "dropout2d",
        F.dropout3d: "dropout3d",
        F.feature_alpha_dropout: "feature_alpha_dropout",
        F.rrelu: "rrelu",
        F.multi_head_attention_forward: "dropout inside nn.MultiheadAttention on one process",
    }
)


class KeyedDropoutError(PTDPError, ValueError):
    """The model drops elements that cannot be identified."""


@dataclass
class _Running:
    """One forward: its samples and its active module calls.

    ``calls`` holds (name, dropouts so far) of each active call, outermost first.
    """

    seed: int
    samples: Tensor
    length: int | None
    calls: list[list[Any]] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class KeyedDropout(Surrounding):
    """Dropout of one rank, independent of the layout.

    It is notified of tensor-parallel regions like ``SplitRandomness``.

    Args:
        tensor: The tensor group.
        context: The context group.
        sequence_parallel: Whether activations are split along the sequence outside of
            tensor-parallel regions.
        seed: Seed of the run.
        sequence_dims: Dimensions of the sequence in a batch (``sequence_batch.py``).
    """

    tensor: Group
    context: Group
    sequence_parallel: bool
    seed: int
    sequence_dims: Mapping[str, int | None] = field(default_factory=dict)
    _inside: bool = field(default=False, init=False)
    _running: _Running | None = field(default=None, init=False)
    _by_us: bool = field(default=False, init=False)

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Track the calls of all modules inside; returns a function that undoes it."""
        undo = contextlib.ExitStack()
        undo.callback(give_randomness(module, self))
        for name, child in module.named_modules():
            undo.enter_context(
                child.register_forward_pre_hook(partial(self._entered, name), prepend=True)
            )
            undo.enter_context(child.register_forward_hook(self._left, always_call=True))
        return undo.close

    def enter(self) -> None:
        """Mark the following activations as split over the tensor group."""
        self._inside = True

    def leave(self) -> None:
        """Mark the following activations as whole."""
        self._inside = False

    @contextlib.contextmanager
    def within(self, *, split: bool) -> Iterator[None]:
        """Drop from a split (or a whole) activation, regardless of the next module."""
        outer = self._inside
        self._inside = split
        yield
        self._inside = outer

    def around(self, forward: Forward) -> Context:
        """Drop by key in training.

        Raises:
            KeyedDropoutError: The batch has no samples to identify.
        """
        if not forward.training:
            return contextlib.nullcontext()
        batch = forward.full_batch
        try:
            length = sequence_length(batch, self.sequence_dims)
        except ValueError:
            length = None
        try:
            count = batch_size(batch)
        except ValueError as error:
            raise KeyedDropoutError(
                "keyed_dropout=True needs the samples along dimension 0 of the batch's tensors, "
                "but this batch has none (as a batch of graphs). Use keyed_dropout=False"
            ) from error
        samples = sample_keys(iterate_tensors(batch), count)
        seed = derive_seed(self.seed, forward.hook, forward.step)
        return self._dropping(_Running(seed, samples, length), inside=False)

    def recomputation(self, forward: Forward) -> Contexts | None:
        """Drop the same elements in the recomputation."""
        running = self._running
        if running is None:
            return None
        replay = _Running(
            running.seed, running.samples, running.length, [list(call) for call in running.calls]
        )
        return self._recomputed(), self._dropping(replay, inside=self._inside)

    @contextlib.contextmanager
    def _recomputed(self) -> Iterator[None]:
        outer = self._by_us
        self._by_us = True
        try:
            yield
        finally:
            self._by_us = outer

    @contextlib.contextmanager
    def _dropping(self, running: _Running, *, inside: bool) -> Iterator[None]:
        outer = (self._running, self._inside)
        self._running = running
        self._inside = inside
        try:
            with Replacing(
                {
                    F.dropout: self.dropout,
                    **intercepted(KeyedAttention(self._kept_weights)),
                    **{function: partial(_without_draws, function) for function in _UNSUPPORTED},
                }
            ):
                yield
        finally:
            self._running, self._inside = outer

    def _entered(self, name: str, *_: object) -> None:
        if self._running is not None:
            self._running.calls.append([name, 0])

    def _left(self, *_: object) -> None:
        if self._running is not None and self._running.calls:
            self._running.calls.pop()

    # ---- replacements of torch's functions -------------------------------------------------------

    def dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Replace ``F.dropout``."""
        if not training or p == 0.0 or self._running is None:
            return input
        factors = self._kept(input, p)
        return input.mul_(factors) if inplace else input * factors

    def _kept_weights(self, weights: Tensor, p: float) -> Tensor:
        """Return the factors of attention weights, as ``_kept``."""
        if self.context.size > 1:
            raise KeyedDropoutError(
                f"keyed_dropout=True with attention dropout of {p} and "
                f"context_parallel_size={self.context.size} is not supported, because no rank "
                "has a full row of attention weights. Set the attention's dropout to 0, or "
                "use keyed_dropout=False"
            )
        return self._kept(weights, p)

    @property
    def _now(self) -> _Running:
        assert self._running is not None
        return self._running

    def _kept(self, x: Tensor, p: float) -> Tensor:
        """Return the factors 0 (dropped) or 1 / (1 - p) (kept), in the shape and dtype of ``x``."""
        running = self._now
        caller = self._caller()
        samples = running.samples.to(x.device)
        if p == 1.0:
            return torch.zeros_like(x)
        if is_recomputed_later(by_us=self._by_us):
            raise KeyedDropoutError(
                f"keyed_dropout=True: dropout in '{caller[0]}' runs inside torch.utils.checkpoint or "
                "the forward of another torch.autograd.Function, whose recomputation would drop "
                "other elements. Turn the model's own checkpointing off and use "
                "PTDPStrategy(recompute='full'), or use keyed_dropout=False"
            )
        if x.dim() < 2 or x.size(0) != samples.numel():
            raise KeyedDropoutError(
                f"keyed_dropout=True: dropout in '{caller[0]}' has an input of shape "
                f"{tuple(x.shape)}, but a microbatch has {samples.numel()} samples, which must "
                "be along dimension 0. Use keyed_dropout=False"
            )
        key = derive_seed(running.seed, *caller)
        indices = [
            self._places(x, dim).view([-1 if d == dim else 1 for d in range(x.dim())])
            for dim in range(1, x.dim())
        ]
        drawn = uniform(samples.view([-1] + [1] * (x.dim() - 1)) ^ key, indices)
        return (drawn >= p).to(x.dtype) / (1 - p)

    def _caller(self) -> tuple[str, int]:
        """Return the innermost module, and the number of its dropouts in this call."""
        if not self._now.calls:
            return "", 0
        call = self._now.calls[-1]
        call[1] += 1
        return call[0], call[1]

    def _places(self, x: Tensor, dim: int) -> Tensor:
        """Return the positions in the full activation of the elements along a dimension."""
        indices = torch.arange(x.size(dim), device=x.device)
        heads = x.dim() == 4
        if dim == (2 if heads else 1) and x.dim() > 2:
            return self._positions(indices)
        split_dim = 1 if heads else x.dim() - 1
        if dim == split_dim and self._inside and not self._is_slice(x):
            return indices + self.tensor.rank * x.size(dim)
        return indices

    def _positions(self, indices: Tensor) -> Tensor:
        """Return the positions in the full sequence of the local tokens 0, 1, ..."""
        running = self._now
        context = self.context
        tensor = self.tensor
        if running.length is None:
            return indices
        places = positions(running.length, context.rank, context.size, device=indices.device)
        if indices.numel() == places.numel():
            return places
        if self.sequence_parallel and indices.numel() * tensor.size == places.numel():
            return places.chunk(tensor.size)[tensor.rank]
        return indices

    def _is_slice(self, x: Tensor) -> bool:
        """Return True if ``x`` is a slice of the sequence, with all channels."""
        parts = self.tensor.size * self.context.size
        return self.sequence_parallel and x.dim() == 3 and x.size(1) * parts == self._now.length


def _without_draws(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Call a function whose random numbers cannot be replaced.

    Raises:
        KeyedDropoutError: It would draw some.
    """
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    if options["training"] and options.get("p", options.get("dropout_p", 1.0)):
        raise KeyedDropoutError(
            f"keyed_dropout=True does not support {_UNSUPPORTED[function]}. Build the module "
            "without it (dropout=0), or use keyed_dropout=False"
        )
    return function(*args, **kwargs)


# ---- Random numbers as a function of indices, without a stream or a state ----------------------
#
# The hash is SplitMix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number
# generators", OOPSLA 2014), applied once per index, in int64 with wrap-around products.


_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15
# 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FIRST = -4658895280553007687
_SECOND = -7723592293110705685


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right logically; torch's shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(key: Tensor, index: Tensor) -> Tensor:
    """Return a new key (broadcast shape, int64) from a key and an index."""
    z = (key ^ (index * _GAMMA)) + _GAMMA
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def uniform(key: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """Return numbers in [0, 1), float32, one for each combination of ``indices``.

    The indices are tensors that broadcast against each other and ``key``.
    """
    for index in indices:
        key = mix(key, index)
    return _shifted(key, 40).to(torch.float32) * 2.0**-24


def sample_keys(tensors: Iterable[Tensor], samples: int) -> Tensor:
    """Return a key (b) int64 of each sample's content.

    The key of a sample does not depend on its batch or its position in the batch.

    Args:
        tensors: Tensors of a batch; those with b entries along dimension 0 are used.
        samples: b.

    Raises:
        ValueError: No tensor has one row per sample.
    """
    keys: Tensor | None = None
    for number, tensor in enumerate(t for t in tensors if t.dim() and t.size(0) == samples):
        rows = _bits(tensor.detach()).reshape(samples, -1)
        positions = torch.arange(rows.size(1), device=rows.device)
        tensor_keys = mix(rows, positions + (number << 40)).sum(1)
        keys = tensor_keys if keys is None else mix(keys, tensor_keys)
    if keys is None:
        raise ValueError(
            "keyed_dropout=True identifies samples by their content, but the batch has no "
            f"tensor of {samples} samples. Use tensors with samples along dimension 0, or "
            "keyed_dropout=False"
        )
    return keys


def _bits(x: Tensor) -> Tensor:
    """Return the elements as int64 values that are equal if and only if the elements are."""
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.double().view(torch.int64) if x.is_floating_point() else x.to(torch.int64)
