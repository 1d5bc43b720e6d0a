"""Functions of torch that mean something else on a slice of the sequence.

Attention covers the full sequence (``attention/``). A model that selects a token gets the token of
the full sequence instead of the slice's: ``x[:, 0]`` for a classifier, ``x[:, -1]`` for a score.
The group's first rank holds both tokens (``sequence_chunks.py``) and broadcasts them.

Sums and means of hidden states over time, ``x.sum(1)`` and ``x.mean(1)``, are those of all ranks.
Their gradient is the sum of the gradients from all ranks' losses.

Shifts along time are refused. The neighbours of the tokens at the ends of a rank's chunks are on
other ranks, so ``logits[:, :-1]`` with ``labels[:, 1:]`` would leave the pair at every end of a
chunk out of the loss.

Random numbers are those of one process: the numbers of the full sequence are drawn, and a rank
keeps those of its slice. All context ranks draw from one stream outside of the blocks. Values of a
sample (a diffusion's time, a mixing factor) are therefore the same on all ranks, and values of a
token are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_ptdp.attention import (
    ContextParallelError,
    SlicedAttention,
    intercepted,
    shard_sequence,
    unshard_sequence,
)
from lightning_ptdp.base.nested import iterate_tensors, map_tensors
from lightning_ptdp.base.torch_calls import Replacing, TorchCall
from lightning_ptdp.forward.token_mixing import has_tokens
from lightning_ptdp.tensor_parallel.collectives import total
from lightning_ptdp.world.mesh import Group

_Function = Callable[..., Tensor]

_REDUCTIONS: tuple[_Function, ...] = (torch.sum, Tensor.sum, torch.mean, Tensor.mean)
_EXTREMES: tuple[_Function, ...] = (torch.max, Tensor.max, torch.min, Tensor.min)
_FILLS = (
    Tensor.uniform_,
    Tensor.normal_,
    Tensor.random_,
    Tensor.exponential_,
    Tensor.bernoulli_,
    Tensor.cauchy_,
    Tensor.geometric_,
    Tensor.log_normal_,
)
_DRAWS: tuple[_Function, ...] = (
    torch.bernoulli,
    Tensor.bernoulli,
    torch.dropout,
    torch.randint_like,
    F.alpha_dropout,
    F.dropout1d,
    F.gumbel_softmax,
)


@dataclass(kw_only=True)
class SliceFunctions:
    """Replaced functions of one forward.

    Attributes:
        attention: Attention that replaces the model's.
        group: The context group.
        length: s, tokens of the full sequence.
        shifts: Error about shifted tokens or labels, if the step has shifted any; else None.
        samples: Number of samples of the batch.
        sizes: Sizes of features. Rows of which there are as many are not those of tokens.
        shares_stream: Returns True while all ranks of the group draw from one stream of random
            numbers.
    """

    attention: SlicedAttention
    group: Group
    length: int
    samples: int = 1
    sizes: Collection[int] = ()
    shifts: ContextParallelError | None = None
    shares_stream: Callable[[], bool] = bool

    def mode(self) -> Replacing:
        """Return the mode under which the functions are replaced."""
        return Replacing(
            {
                **{fill: partial(self._fill, fill) for fill in _FILLS},
                torch.rand: partial(self._new, Tensor.uniform_),
                torch.randn: partial(self._new, Tensor.normal_),
                torch.rand_like: partial(self._like, Tensor.uniform_),
                torch.randn_like: partial(self._like, Tensor.normal_),
                torch.randint: self._integers,
                torch.normal: self._normal,
                nn.init.normal_: partial(self._initialize, Tensor.normal_),
                nn.init.uniform_: partial(self._initialize, Tensor.uniform_),
                **{draw: partial(self._draw, draw) for draw in _DRAWS},
                **{
                    draw: partial(self._choose, draw)
                    for draw in (torch.multinomial, Tensor.multinomial)
                },
                F.dropout: self._dropout,
                **{reduce: partial(self._reduce, reduce) for reduce in _REDUCTIONS},
                **{extreme: partial(self._extreme, extreme) for extreme in _EXTREMES},
                **{roll: partial(self._roll, roll) for roll in (torch.roll, Tensor.roll)},
                **{cut: partial(self._narrow, cut) for cut in (torch.narrow, Tensor.narrow)},
                **intercepted(self.attention),
                Tensor.__getitem__: self.index,
            }
        )

    def _has_slice(self, x: Tensor) -> bool:
        """Return True if ``x`` has this rank's tokens along dimension 1."""
        return x.dim() > 1 and x.size(1) * self.group.size == self.length

    # ---- selection of a token --------------------------------------------------------------------

    def index(self, x: Tensor, index: Any) -> Tensor:
        """Return ``x[index]`` of the full sequence, if it selects a token.

        Collective then.

        Raises:
            ContextParallelError: It shifts the sequence, or selects a token in the middle.
        """
        try:
            self.check_index(x, index)
        except ContextParallelError as error:
            if x.is_floating_point():
                raise
            # A step may shift labels only to count those of a model that shifts.
            self.shifts = error
        if self.selects_token(x, index):
            return _FromFirst.apply(x[index].contiguous(), self.group)
        return x[index]

    def selects_token(self, x: Tensor, index: object) -> bool:
        """Return True if ``x[index]`` selects a token of (b, s/c, h) or (b, s/c).

        It must do so on all ranks of the group. Hidden states (b, s/c, h) are recognized by their
        floating-point dtype and the slice's length along dimension 1. Labels and scores (b, s/c)
        may be other values of samples, but these are the same on all ranks.

        Raises:
            ContextParallelError: A token in the middle is selected, or a token of each sample by
                number.
        """
        is_hidden = x.dim() == 3 and x.is_floating_point()
        has_one = x.dim() == 2 and x.size(0) == self.samples
        if not (is_hidden or has_one) or not self._has_slice(x):
            return False
        if not (isinstance(index, tuple) and len(index) > 1):
            return False
        samples, token = index[:2]
        if (
            is_hidden
            and isinstance(samples, Tensor)
            and isinstance(token, Tensor)
            and not token.is_floating_point()
        ):
            selection = "a token per sample by its index"
        elif isinstance(samples, Tensor) or samples != slice(None) or type(token) is not int:
            return False
        elif token in (0, -1):
            return True
        else:
            selection = f"token {token}"
        raise ContextParallelError(
            f"the model selects {selection} from a tensor {tuple(x.shape)}, but each of {self.group.size} "
            f"context ranks has a slice of {x.size(1)} tokens. Only the first (0) and the last (-1) "
            "token can be selected. Use context_parallel_size=1"
        )

    # ---- sums over time --------------------------------------------------------------------------

    def _reduce(self, reduce: _Function, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        local = reduce(input, *args, **kwargs)
        name = reduce.__name__
        dims = TorchCall(reduce, (input, *args), kwargs).dims()
        if not (1 in dims and len(dims) < input.dim() and self._sums_tokens(input, name)):
            return local
        result = total(local, self.group)
        return result / self.group.size if name == "mean" else result

    def _extreme(self, extreme: _Function, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the largest or smallest number of all tokens; collective for integers (b, s/c).

        Rotary embeddings that depend on the length (dynamic, LongRoPE) take the last position.
        """
        result = extreme(input, *args, **kwargs)
        is_ids = input.dim() == 2 and not input.is_floating_point() and input.dtype != torch.bool
        if is_ids and not args and not kwargs and self._has_slice(input):
            op = dist.ReduceOp.MAX if extreme.__name__ == "max" else dist.ReduceOp.MIN
            dist.all_reduce(result, op=op, group=self.group.handle)
        return result

    def _sums_tokens(self, x: Tensor, name: str) -> bool:
        """Return True for a reduction of hidden states (b, s/c, h) over time.

        Raises:
            ContextParallelError: It reduces (b, s/c), which may mean the full sequence, for a
                score of each sample, or this rank's tokens, for the divisor of a mean.
        """
        tokens = self.length // self.group.size
        if not has_tokens(x, tokens):
            return False
        # A row per token has features. There may be several rows per sample, as in pairs.
        if x.dim() == 2 and x.size(0) % self.samples == 0 and x.size(0) < self.samples * tokens:
            raise ContextParallelError(
                f"the step computes the {name} over dimension 1 of a tensor {tuple(x.shape)}, but "
                f"each of {self.group.size} context ranks has a slice of {tokens} tokens. Write "
                f"x.unsqueeze(-1).{name}(1).squeeze(-1) for the {name} over whole sequences, "
                "x.sum() and x.mean() for a loss over the rank's tokens, and x.unsqueeze(1)"
                f".{name}(-1).squeeze(1) if the dimension has features. Or use "
                "context_parallel_size=1"
            )
        return x.dim() == 3

    # ---- shifts along time -----------------------------------------------------------------------

    def check_index(self, x: Tensor, index: object) -> None:
        """Check that ``x[index]`` drops no tokens at an end of this rank's slice.

        Only hidden states or logits (b, s/c, h), and tokens or labels (b, s/c), are checked.

        Raises:
            ContextParallelError: It drops tokens.
        """
        span = _along_time(index, x.dim()) if self._is_slice(x) else None
        if span is None:
            return
        start, stop, step = span.indices(x.size(1))
        # A selection of half of the tokens or less is not a shift.
        if step == 1 and x.size(1) < 2 * (stop - start) < 2 * x.size(1):
            ends = ":".join("" if end is None else str(end) for end in (span.start, span.stop))
            self._refuse(f"takes tokens [{ends}]", x)

    def _roll(self, function: _Function, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dims = kwargs.get("dims", args[-1] if len(args) > 1 else None)
        dims = (dims,) if isinstance(dims, int) else dims or ()
        if self._is_slice(input) and any(dim % input.dim() == 1 for dim in dims):
            self._refuse("rolls the tokens", input)
        return function(input, *args, **kwargs)

    def _narrow(
        self, function: _Function, input: Tensor, dim: int, start: Any, length: int
    ) -> Tensor:
        if isinstance(start, int) and dim % max(input.dim(), 1) == 1:
            start = start % input.size(1) if start < 0 else start
            self.check_index(input, (slice(None), slice(start, start + length)))
        return function(input, dim, start, length)

    def _is_slice(self, x: Tensor) -> bool:
        """Return True for a slice of hidden states or logits, or of tokens or labels."""
        return x.dim() == (3 if x.is_floating_point() else 2) and self._has_slice(x)

    def _refuse(self, action: str, x: Tensor) -> NoReturn:
        raise ContextParallelError(
            f"the step {action} of a tensor {tuple(x.shape)}, but each of {self.group.size} context "
            f"ranks has {x.size(1)} of {self.length} tokens, in two chunks. Pairs of neighbours at "
            "the ends of the chunks would be lost. Shift labels in the dataset or the collate "
            "function, or use context_parallel_size=1"
        )

    # ---- random numbers --------------------------------------------------------------------------

    def _has_rows(self, x: Tensor) -> bool:
        """Return True if ``x`` has a row for each of this rank's tokens, (b s/c, ...)."""
        tokens = self.length // self.group.size
        rows = self.samples * tokens
        return x.dim() > 0 and x.size(0) == rows and tokens > 1 and rows not in self.sizes

    def _draws_slice(self, x: Tensor) -> bool:
        return self.shares_stream() and (self._has_rows(x) or self._has_slice(x))

    def _fill(self, fill: _Function, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self._draws_slice(x):
            return fill(x, *args, **kwargs)
        with torch.no_grad():
            full = torch.empty_like(self._full(x))
            drawn = fill(full, *map(self._full, args), **map_tensors(kwargs, self._full))
            return x.copy_(self._own(drawn, rows=self._has_rows(x)))

    def _draw(self, function: _Function, *args: Any, **kwargs: Any) -> Tensor:
        """Return the numbers of this rank's tokens; they depend on no other token's arguments."""
        slices = [x for x in iterate_tensors((args, kwargs)) if self._draws_slice(x)]
        if not slices:
            return function(*args, **kwargs)
        drawn = function(*map(self._full, args), **map_tensors(kwargs, self._full))
        return self._own(drawn, rows=self._has_rows(slices[0]))

    def _choose(self, choose: _Function, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return choices for each row of tokens; (b, s/c) may have s/c other choices."""
        is_rows = input.dim() == 2 and self._has_rows(input)
        function = partial(self._draw, choose) if is_rows else choose
        return function(input, *args, **kwargs)

    def _full(self, x: Any) -> Any:
        """Return a tensor of the full sequence with this rank's values, or ``x`` if it is no slice."""
        if not isinstance(x, Tensor) or not self._draws_slice(x):
            return x
        rows = self._has_rows(x)
        own = x.reshape(self.samples, -1, *x.shape[1:]) if rows else x
        full = unshard_sequence([own] * self.group.size, 1)
        return full.flatten(0, 1) if rows else full

    def _own(self, drawn: Tensor, *, rows: bool) -> Tensor:
        """Return this rank's part of numbers of the full sequence, (b, s, ...) or (b s, ...)."""
        if rows:
            drawn = drawn.reshape(self.samples, self.length, *drawn.shape[1:])
        own = shard_sequence(drawn, 1, rank=self.group.rank, size=self.group.size)
        return own.flatten(0, 1) if rows else own

    def _new(self, fill: _Function, *size: Any, **kwargs: Any) -> Tensor:
        return self._filled(fill, partial(torch.empty, *size), kwargs)

    def _like(self, fill: _Function, input: Tensor, **kwargs: Any) -> Tensor:
        return self._filled(fill, partial(torch.empty_like, input), kwargs)

    def _integers(self, *args: Any, **kwargs: Any) -> Tensor:
        numbers = list(args)
        size = kwargs.pop("size") if "size" in kwargs else numbers.pop()
        high = kwargs.pop("high") if "high" in kwargs else numbers.pop()
        low = kwargs.pop("low", numbers[0] if numbers else 0)
        options = {"dtype": torch.int64, **kwargs}
        return self._filled(Tensor.random_, partial(torch.empty, size), options, low, high)

    def _normal(self, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
        if size is None:
            return self._draw(torch.normal, mean, std, **options)
        return self._filled(Tensor.normal_, partial(torch.empty, size), options, mean, std)

    def _initialize(
        self, fill: _Function, tensor: Tensor, *, generator: Any = None, **limits: float
    ) -> Tensor:
        """Fill a tensor as ``torch.nn.init`` does, which passes all arguments by name."""
        with torch.no_grad():
            return self._fill(fill, tensor, *limits.values(), generator=generator)

    def _filled(
        self, fill: _Function, make: _Function, options: dict[str, Any], *limits: float
    ) -> Tensor:
        """Make a tensor with the options of a function like ``torch.rand``, and fill it."""
        generator = options.pop("generator", None)
        requires_grad = options.pop("requires_grad", False)
        filled = self._fill(fill, make(**options), *limits, generator=generator)
        return filled.requires_grad_(requires_grad)

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or not 0 < p < 1 or not self._draws_slice(input):
            return F.dropout(input, p, training, inplace)
        dropout_mask = self._fill(Tensor.bernoulli_, torch.empty_like(input), 1 - p).div_(1 - p)
        return input.mul_(dropout_mask) if inplace else input * dropout_mask


class _FromFirst(torch.autograd.Function):
    """Broadcast of the first rank's tensor; its gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        result = x.detach().clone()
        dist.broadcast(result, src=group.ranks[0], group=group.handle)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group.handle)
        return total if ctx.group.rank == 0 else torch.zeros_like(total), None


def _along_time(index: object, dims: int) -> slice | None:
    """Return the slice of ``index`` for dimension 1, if it consists of slices and numbers."""
    if not isinstance(index, tuple):
        return None
    entries = [
        entry if isinstance(entry, (slice, int)) or entry is Ellipsis else None for entry in index
    ]
    if None in entries:
        return None
    if Ellipsis in entries:
        place = entries.index(Ellipsis)
        entries[place : place + 1] = [slice(None)] * (dims - len(entries) + 1)
    return entries[1] if len(entries) > 1 and isinstance(entries[1], slice) else None
