"""Fused head and loss against ``F.cross_entropy`` of the head's output: values, gradients, memory,
communication."""

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptdp.tensor_parallel import (
    VocabularyParallelHead,
    VocabularyRange,
    linear_cross_entropy,
)
from lightning_ptdp.world.mesh import Group
from tests.tensor_parallel.toy import (
    assert_same,
    counted_collectives,
    own_slice,
    tensor_group,
    with_z_loss,
)

_V, _H = 37, 6
_ROWS = 8 * 2**-18  # MiB of logits of eight tokens for one row of the head


def _draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _head(group, weight, bias, *, sequence_parallel):
    words = VocabularyRange(size=_V, parts=group.size, index=group.rank)

    def local(full):
        rows = torch.zeros(words.rows, *full.shape[1:], dtype=full.dtype)
        rows[: words.count] = full[words.start : words.stop]
        return nn.Parameter(rows)

    if group.size > 1:
        own_bias = None if bias is None else local(bias)
        return VocabularyParallelHead(
            local(weight),
            own_bias,
            vocabulary=words,
            group=group,
            sequence_parallel=sequence_parallel,
        )
    head = nn.Linear(_H, _V, bias=bias is not None, dtype=weight.dtype)
    head.weight = nn.Parameter(weight.clone())
    if bias is not None:
        head.bias = nn.Parameter(bias.clone())
    return head


def _compare(group, *, rows, sequence_parallel=False, adds=False, **options):
    """Compare loss and gradients with torch's, with ``rows`` rows of the head per chunk."""
    weight, bias, x = (
        _draw(_V, _H, seed=1),
        _draw(_V, seed=2) if rows % 2 else None,
        _draw(2, 4, _H, seed=3),
    )
    nowhere = options.get("ignore_index", -100)
    target = torch.tensor([[0, 36, nowhere, 5], [18, 19, 5, nowhere]])
    full = [tensor.clone().requires_grad_() for tensor in (weight, x)] + (
        [] if bias is None else [bias.clone().requires_grad_()]
    )
    logits = full[1] @ full[0].t() + (0 if bias is None else full[2])
    expected = with_z_loss(logits, target, **{"z_loss": 0.0, **options})
    grad = (
        torch.rand(expected.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        * 64
    )
    expected.backward(grad)

    head = _head(group, weight, bias, sequence_parallel=sequence_parallel)
    if adds:
        head.weight.grad = torch.ones_like(head.weight)
    mine = (own_slice(x, group, 1) if sequence_parallel else x).clone().requires_grad_()
    with counted_collectives() as counts:
        loss = linear_cross_entropy(mine, head, target, chunk_mb=rows * _ROWS, **options)
        loss.backward(grad)
    assert_same(loss, expected)
    assert full[1].grad is not None
    assert_same(mine.grad, own_slice(full[1].grad, group, 1) if sequence_parallel else full[1].grad)
    words = VocabularyRange(size=_V, parts=group.size, index=group.rank)
    for parameter, reference in zip(head.parameters(), (full[0], *full[2:]), strict=True):
        found = parameter.grad - 1 if adds and parameter is head.weight else parameter.grad
        assert_same(found[: words.count], reference.grad[words.start : words.stop])
        assert not found[words.count :].any(), "padding got a gradient"
    if group.size > 1 and rows < _V // 2:  # regardless of the number of chunks
        sums = (
            {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
            if sequence_parallel
            else {"all_reduce": 3}
        )
        assert counts == sums


def _check(rank):
    group = tensor_group(rank)
    for rows in (1, 4, 18, 100):  # 100: in one chunk
        for sequence_parallel in (False, True)[: group.size]:
            for options in (
                {},
                {"reduction": "sum", "label_smoothing": 0.1},
                {"reduction": "none", "z_loss": 1e-2},
            ):
                _compare(
                    group, rows=rows, sequence_parallel=sequence_parallel, adds=rows == 4, **options
                )
    _compare(group, rows=5, ignore_index=5, label_smoothing=1.0)
    head = _head(group, _draw(_V, _H, seed=1), None, sequence_parallel=False)
    for bad in (_V, -1):
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
            linear_cross_entropy(_draw(1, _H, seed=3), head, torch.tensor([bad]), chunk_mb=_ROWS)
    nothing = linear_cross_entropy(
        _draw(2, _H, seed=3), head, torch.tensor([-100, -100]), chunk_mb=_ROWS, reduction="sum"
    )
    nothing.backward()
    assert nothing.item() == 0
    assert not head.weight.grad.any()


def test_linear_cross_entropy_matches_torch(pool):
    _check(0)
    pool.run(_check, world_size=2)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_loss_is_computed_in_float32(autocast):
    weight, x, target = _draw(_V, _H, seed=1), _draw(8, _H, seed=3), torch.arange(8)
    dtype = torch.float32 if autocast else torch.bfloat16
    results = []
    for chunk_mb in (4 * _ROWS, 1.0):
        head, mine = (
            _head(Group(), weight.to(dtype), None, sequence_parallel=False),
            x.to(dtype).requires_grad_(),
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = linear_cross_entropy(mine, head, target, chunk_mb=chunk_mb)
        loss.backward()
        assert loss.dtype is torch.float32
        assert head.weight.grad.dtype is dtype
        results.append((loss, mine.grad, head.weight.grad))
    (loss, *gradients), (whole, *expected) = results
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=1e-6)
    for found, value in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, value, rtol=2e-2, atol=2e-3)


def test_head_with_hook_or_custom_forward_is_called():
    class Capped(nn.Linear):
        def forward(self, x):
            return super().forward(x).tanh()

    seen, plain, capped = [], nn.Linear(_H, _V), Capped(_H, _V)
    plain.register_forward_hook(lambda *_: seen.append(1))
    x, target = _draw(8, _H, seed=3).float(), torch.arange(8)
    for head in (plain, capped):
        found = linear_cross_entropy(x, head, target, chunk_mb=_ROWS)
        torch.testing.assert_close(found, nn.functional.cross_entropy(head(x), target))
    assert len(seen) == 2


def test_compiled_loss_accumulates_gradients_like_eager():
    head, x, target = nn.Linear(_H, _V), _draw(8, _H, seed=3).float(), torch.arange(8)
    gradients = []
    for run in (
        linear_cross_entropy,
        torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True),
    ):
        head.zero_grad()
        for _ in range(2):  # the second run accumulates
            run(x, head, target, chunk_mb=4 * _ROWS).backward()
        gradients.append([parameter.grad.clone() for parameter in head.parameters()])
    torch.testing.assert_close(*gradients)


class _Peak(TorchDispatchMode):
    """Peak bytes of the tensors created under it, each storage counted once."""

    def __init__(self):
        super().__init__()
        self.most = 0
        self._made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if (
                isinstance(tensor, Tensor)
                and (storage := tensor.untyped_storage())._cdata not in given
            ):
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return result


def test_chunked_loss_takes_under_an_eighth_of_peak_memory():
    """The sizes are a vocabulary of 128k, a sequence of 4096 and 4096 channels, each divided by 32.
    The weight has a gradient already."""
    v, s, h = 4096, 128, 128
    head, x, target = (
        nn.Linear(h, v, bias=False).bfloat16(),
        torch.randn(1, s, h).bfloat16(),
        torch.arange(s)[None],
    )
    head.weight.grad = torch.zeros_like(head.weight)
    peaks = []
    for chunk_mb in (128 / 32**2, 1e9):
        with _Peak() as peak:
            linear_cross_entropy(x.requires_grad_(), head, target, chunk_mb=chunk_mb).backward()
        peaks.append(peak.most)
    assert peaks[0] < peaks[1] / 8
