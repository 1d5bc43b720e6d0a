"""Detection of functions that combine tokens of a sequence that is split over ranks.

Elementwise functions, products with weights and norms of features treat each token alone. Attention
and losses are replaced or averaged elsewhere. Any other function along time, such as a running sum,
would combine the tokens of the slice only.

A tensor has this rank's tokens if its shape says so: (b, n, h), (b n, h) or (b, n) with n tokens,
and (b, h, n) in functions of torch that work along the last dimension.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Collection, Container, Sequence
from functools import partial
from itertools import permutations
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from lightning_ptdp.base.nested import iterate_tensors
from lightning_ptdp.base.partial_values import PartialModelError
from lightning_ptdp.base.torch_calls import (
    CallMode,
    TorchCall,
    calling_line,
    is_size_error,
    running_modules,
)
from lightning_ptdp.forward.slice_positions import SlicePositions
from lightning_ptdp.forward.surroundings import Context, FirstForwards
from lightning_ptdp.shims.torch import has_compiled_parts

_ALONG_LAST = frozenset(
    (
        "adaptive_avg_pool1d",
        "adaptive_max_pool1d",
        "avg_pool1d",
        "batch_norm",
        "conv1d",
        "instance_norm",
        "interpolate",
        "max_pool1d",
    )
)
_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
_PRODUCTS = frozenset(("matmul", "__matmul__", "bmm", "mm"))
_AVERAGED = frozenset(
    (
        "mean",
        "sum",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cross_entropy",
        "kl_div",
    )
)
"""Functions other than losses whose value for all tokens is the mean or sum over the slices."""
ORDERING = frozenset(
    (
        "argsort",
        "cummax",
        "cummin",
        "cumprod",
        "cumsum",
        "kthvalue",
        "log_softmax",
        "logcumsumexp",
        "quantile",
        "softmax",
        "sort",
        "topk",
    )
)
"""Functions whose result depends on the order or the set of the elements."""
_CHOOSING = frozenset(("__getitem__", "masked_select"))
"""Functions that choose tokens by a mask, as a loss of some tokens does."""
_OF_IDS = frozenset(("all", "amax", "amin", "any", "argmax", "argmin", "max", "min"))
"""Functions of tokens or labels (b, n) that are refused; a count or a running sum may be of use."""
_JOINS = frozenset(("cat", "concat", "concatenate"))
ATTENTION = MappingProxyType(
    {"scaled_dot_product_attention": -2, "multi_head_attention_forward": 0}
)
"""Functions that compute attention -> dimension of the tokens."""


def has_tokens(x: object, tokens: int) -> bool:
    """Return True for a tensor (b, n, h), or (b, n), with n ``tokens``."""
    return isinstance(x, Tensor) and x.dim() in (2, 3) and x.size(1) == tokens


class TokenMixing(CallMode):
    """Mode that refuses functions that combine tokens.

    Code of this package may call them, because it exchanges the other ranks' tokens itself.

    Args:
        refusal: Makes the error from the line, function and shape.
        refused_positions: Makes the error about positions in a slice from the line.
        sizes: Sizes of features. A tensor (b, n) with one of these sizes may have no tokens, and is
            not checked.
        allowed: Names of functions that may combine tokens.

    Attributes:
        averages: Modules outside of which a sum or mean of all elements with a gradient is allowed,
            because ranks average the loss that it is a part of; None: it never is.
        tokens: n, tokens of this rank's slice; 0: not known yet, and nothing is checked.
        samples: b.
        length: Tokens of the full sequence, if known.
    """

    length: int = sys.maxsize

    def __init__(
        self,
        refusal: Callable[[str], Exception],
        *,
        sizes: Collection[int],
        refused_positions: Callable[[str], Exception],
        allowed: Collection[str] = (),
        averages: Container[nn.Module] | None = None,
        tokens: int = 0,
        samples: int = 0,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.samples = samples
        self._averages = averages
        self._refusal = refusal
        self._refused_positions = refused_positions
        self._positions = SlicePositions()
        self._sizes = sizes
        self._allowed = allowed

    def observe_call(self, call: TorchCall) -> Any:
        """Run a call, and refuse it if it combines tokens."""
        line = calling_line("lightning_ptdp") if self.tokens else None
        if line is None:
            return call.run()
        if self._mixes_rows(call) or (call.name not in self._allowed and self._mixes(call)):
            self._refuse(line, call)
        try:
            result = call.run()
        except RuntimeError as error:
            tensors = call.tensors()
            if not is_size_error(error) or not self._meets_more_tokens(tensors):
                raise
            shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise self._refused_positions(
                f"{line} calls {call.name} on tensors {shapes}"
            ) from error
        if self._is_total(call, result):
            # A maximum may be logged, with the same reduction over the ranks.
            warns = call.name in ("max", "min") and self._averages_here()
            self._refuse(line, call, warns=warns)
        elif self._loses_tokens(call, result):
            self._refuse(line, call)
        elif self.tokens not in self._sizes:
            counted = self._positions.counted_at(line, call, result, self.tokens, self.length)
            if counted is not None:
                raise self._refused_positions(f"{counted} counts positions from 0 ({call.name})")
        return result

    def _refuse(self, line: str, call: TorchCall, *, warns: bool = False) -> None:
        first = next(iterate_tensors(call.values))
        error = self._refusal(f"{line} calls {call.name} on a tensor {tuple(first.shape)}")
        if not warns:
            raise error
        warnings.warn(str(error), stacklevel=4)

    def _meets_more_tokens(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if a tensor has tokens of the slice where another one has those of all."""
        n = self.tokens
        for one, other in permutations(tensors, 2):
            pairs = zip(reversed(one.shape), reversed(other.shape), strict=False)
            if has_tokens(one, n) and any(
                size == n < more and more % n == 0 for size, more in pairs
            ):
                return True
        return False

    def _averages_here(self) -> bool:
        averages = self._averages
        return averages is not None and not any(one in averages for one in running_modules())

    def _is_total(self, call: TorchCall, result: Any) -> bool:
        """Return True for one number of all tokens, whose mean over ranks is another value."""
        if (
            not isinstance(result, Tensor)
            or result.numel() != 1
            or not result.is_floating_point()
            or not any(
                (self._has_tokens(x) or self._is_flat(x, 1)) and not isinstance(x, nn.Parameter)
                for x in call.values[:2]
            )
            or call.name in _CHOOSING
            or 0 < len(call.dims()) < call.first.dim()
        ):
            return False
        if not self._averages_here():
            return True
        is_averaged = call.name in _AVERAGED or call.name.endswith("_loss")
        return result.requires_grad and not is_averaged

    def _loses_tokens(self, call: TorchCall, result: Any) -> bool:
        """Return True if an argument has a dimension of n tokens, and the result none.

        A result with n times another dimension of the argument still has all tokens.
        """
        n = self.tokens
        name = call.name
        if name in self._allowed or name in _CHOOSING or call.makes_new or n in self._sizes:
            return False
        results = [tensor for tensor in iterate_tensors(result) if tensor.numel() > 1]
        for x in call.values if results else ():
            at = self._token_dim(x)
            if at is not None:
                others = [size for dim, size in enumerate(x.shape) if dim != at]
                kept = {n}
                for size in others:
                    kept |= {size * one for one in kept}
                return not any(kept.intersection(tensor.shape) for tensor in results)
        return False

    def _token_dim(self, x: object) -> int | None:
        """Return the dimension of the tokens of a hidden state, or of heads.

        (b, n, h), (b, h, n), (n, b, h), (b, n, k, d) or (b, k, n, d).
        """
        b = self.samples
        n = self.tokens
        if not isinstance(x, Tensor) or not 3 <= x.dim() <= 4 or not x.is_floating_point():
            return None
        if x.dim() == 3 and x.shape[:2] == (n, b):
            return 0 if n != b else 1
        if x.size(0) != b:
            return None
        if x.size(1) == n:
            return 1
        is_second = x.size(2) == n and (x.dim() == 4 or x.size(1) in self._sizes)
        return 2 if is_second else None

    def _depends_on_slice(self, call: TorchCall) -> bool:
        """Return True for functions of all tokens whose result has no dimension of tokens."""
        x = call.first
        if call.name == "multinomial":
            return self._has_tokens(x)
        if call.name == "ctc_loss":
            return x.size(0) == self.tokens
        # The loss is that of the slice, and so are gradients of what all tokens share.
        inputs = call.argument(1, "inputs", ()) if call.name == "grad" else ()
        return any(isinstance(one, nn.Parameter) for one in iterate_tensors(inputs))

    def _mixes(self, call: TorchCall) -> bool:
        if self._depends_on_slice(call):
            return True
        name = call.name
        x = call.first
        if name in _JOINS:
            dim = call.argument(1, "dim", 0)
            return any(self._is_hidden(part) and dim in (1, -2) for part in x or ())
        if name == "einsum" and isinstance(x, str) and "->" in x:
            inputs, _, output = x.replace(" ", "").partition("->")
            pairs = zip(inputs.split(","), call.others, strict=False)
            return any(
                self._is_hidden(operand) and len(letters) == 3 and letters[1] not in output
                for letters, operand in pairs
            )
        if not isinstance(x, Tensor):
            return False
        unclear = self.tokens in self._sizes
        if dims := call.dims():
            if 1 in dims and self._has_tokens(x):
                return len(dims) < x.dim()
            is_ids = x.dim() == 2 and len(x) == self.samples and has_tokens(x, self.tokens)
            return not unclear and (
                (1 in dims and is_ids and name in _OF_IDS) or self._token_dim(x) in dims
            )
        second = call.second
        if name in _ALONG_LAST:
            window = second.size(-1) if isinstance(second, Tensor) else 2
            return x.dim() == 3 and x.size(-1) == self.tokens and window > 1 and not unclear
        if name in _PRODUCTS and not unclear:
            return self._contracts(x, second)
        if name == "pad" and self._is_hidden(x):
            return isinstance(second, Sequence) and any(second[2:4])
        if name == "__getitem__" and self._is_hidden(x):
            return _selects_tokens(second)
        if name in ATTENTION:
            return x.size(ATTENTION[name]) == self.tokens
        return name in _RECURRENT and self.tokens in x.shape

    def _mixes_rows(self, call: TorchCall) -> bool:
        """Return True if a function combines the rows of a tensor (b n, h)."""
        x = call.first
        if call.name in _PRODUCTS and len(call.args) == 2:
            return self._is_flat(call.args[1]) and x.dim() == 2 and x.requires_grad
        if call.dims() != (0,):
            return False
        return self._is_flat(x) or (call.name in ORDERING and self._is_flat(x, 1))

    def _contracts(self, x: Tensor, other: object) -> bool:
        """Return True for scores of attention, (..., n, n), and for sums of (b, n, h) over n."""
        if not isinstance(other, Tensor) or min(x.dim(), other.dim()) < 3:
            return False
        n = self.tokens
        # Within attention the n columns of (..., s, n) are features of a head.
        sums = (x.size(-1), other.size(-2)) == (n, n) and x.size(-2) % n > 0
        return sums or (x.size(-2), other.size(-1)) == (n, n)

    def _is_flat(self, x: object, dims: int = 2) -> bool:
        """Return True for rows with a gradient: (b n, h), or (n, h) of one sample.

        With ``dims=1``, for one number per row.
        """
        n = self.tokens
        rows = self.samples * n
        return (
            isinstance(x, Tensor)
            and x.dim() == dims
            and (len(x) == rows > n or len(x) == n != self.samples)
            and len(x) not in self._sizes
            and x.is_floating_point()
            and x.requires_grad
        )

    def _is_hidden(self, x: object) -> bool:
        return has_tokens(x, self.tokens) and isinstance(x, Tensor) and x.dim() == 3

    def _has_tokens(self, x: object) -> bool:
        """Return True for hidden states, and for numbers of tokens such as losses."""
        if not isinstance(x, Tensor) or not has_tokens(x, self.tokens):
            return False
        return x.dim() == 3 or (x.is_floating_point() and self.tokens not in self._sizes)


def _selects_tokens(index: object) -> bool:
    if not (isinstance(index, tuple) and len(index) > 1 and isinstance(index[0], slice)):
        return False
    return isinstance(index[1], int | slice) and index[1] != slice(None)


def feature_sizes(module: nn.Module) -> frozenset[int]:
    """Return the sizes of all dimensions of a module's parameters."""
    return frozenset(size for parameter in module.parameters() for size in parameter.shape)


class SplitTokens(FirstForwards):
    """Refusal of functions that combine tokens while sequence parallelism splits them.

    It watches the first forward of each kind, from the first slice on.

    Args:
        blocks: Names of this rank's blocks.
        embeddings: Names of the modules whose output is a slice.
    """

    def __init__(self, blocks: Collection[str], *, embeddings: Collection[str] = ()) -> None:
        super().__init__()
        self._blocks = blocks
        self._embeddings = embeddings
        self._mode: TokenMixing | None = None

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Install hooks on the modules whose input or output shows the length of a slice."""
        nothing = super().attach(module)
        if has_compiled_parts(module):
            return nothing
        self._mode = TokenMixing(
            _refused_split, refused_positions=_refused_positions, sizes=feature_sizes(module)
        )
        # A copy of a block copies its hooks, which must not lead to the whole module.
        note = partial(_note_slice, self._mode)
        with contextlib.ExitStack() as undo:
            for name in self._blocks:
                block = module.get_submodule(name)
                handle = block.register_forward_pre_hook(note, with_kwargs=True)
                undo.callback(handle.remove)
            for name in self._embeddings:
                undo.enter_context(module.get_submodule(name).register_forward_hook(note))
            return undo.pop_all().close

    def first(self, module: nn.Module) -> Context:
        """Watch the forward."""
        return super().first(module) if self._mode is None else self._mode


def _note_slice(mode: TokenMixing, _module: nn.Module, args: Any, more: Any) -> None:
    hidden = next((x for x in iterate_tensors((args, more)) if x.dim() == 3), None)
    if hidden is not None:
        mode.samples, mode.tokens = hidden.shape[:2]


def _refused_positions(call: str) -> PartialModelError:
    return PartialModelError(
        f"{call}, but with sequence_parallel=True each tensor rank has a slice of the sequence "
        "here. Declare an embedding of positions as 'position', and count the token ids instead. "
        "For other positions, use ParallelPlan(sequence='blocks'). Or use sequence_parallel=False"
    )


def _refused_split(call: str) -> PartialModelError:
    return PartialModelError(
        f"{call}, which combines tokens, but with sequence_parallel=True each tensor rank has a "
        "slice of the sequence here. Add the module to the plan: attention as 'column' and 'row' "
        "layers or a 'region', other modules as 'whole'. For code after the blocks, use "
        "ParallelPlan(sequence='blocks'). Or use sequence_parallel=False"
    )
