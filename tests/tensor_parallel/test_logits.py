"""Losses and outputs for full logits on vocabulary-parallel ones: same values and gradients,
gathered only if necessary."""

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_ptdp.tensor_parallel import VocabularyParallelLogits, VocabularyRange, gather_full
from lightning_ptdp.tensor_parallel.logits import keeps_vocabulary
from lightning_ptdp.world.mesh import Group
from tests.tensor_parallel.toy import assert_same, counted_collectives, tensor_group

B, S, V = 2, 5, 13


def hugging_face(logits, y):
    """Return the loss of transformers' ForCausalLMLoss."""
    logits = logits.float()
    shifted = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(
        logits.view(-1, V), shifted.view(-1).to(logits.device), ignore_index=-100, reduction="mean"
    )


# Losses that do not gather the vocabulary.
CHEAP = {
    "flatten": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "flatten end": lambda x, y: F.cross_entropy(x.flatten(end_dim=-2), y.flatten()),
    "torch.flatten": lambda x, y: F.cross_entropy(torch.flatten(x, 0, 1), y.flatten()),
    "view(-1, size)": lambda x, y: F.cross_entropy(x.view(-1, x.size(-1)), y.view(-1)),
    "view(rows, -1)": lambda x, y: F.cross_entropy(x.view(B * S, -1), y.view(-1)),
    "view(tuple)": lambda x, y: F.cross_entropy(
        x.view((x.shape[0] * x.shape[1], x.shape[2])), y.view(-1)
    ),
    "reshape": lambda x, y: F.cross_entropy(x.reshape(-1, x.shape[-1]), y.reshape(-1)),
    "torch.reshape": lambda x, y: F.cross_entropy(torch.reshape(x, (-1, V)), y.reshape(-1)),
    "unflatten": lambda x, y: F.cross_entropy(
        x.flatten(0, 1).unflatten(0, (B, S)).flatten(0, 1), y.flatten()
    ),
    "shifted": lambda x, y: F.cross_entropy(x[:, :-1, :].reshape(-1, V), y[:, 1:].reshape(-1)),
    "shifted, contiguous": lambda x, y: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, V), y[..., 1:].contiguous().view(-1)
    ),
    "hugging face": hugging_face,
    "masked": lambda x, y: F.cross_entropy(x[y > 3], y[y > 3]),
    "module": lambda x, y: nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1)(
        x.flatten(0, 1), y.flatten()
    ),
    "keywords": lambda x, y: F.cross_entropy(
        input=x.flatten(0, 1), target=y.flatten(), reduction="sum"
    ),
    "none": lambda x, y: (
        F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)[:, 1:].mean()
    ),
    "scaled": lambda x, y: F.cross_entropy((x / 0.7 * 2).flatten(0, 1), y.flatten()),
    "soft cap": lambda x, y: F.cross_entropy(
        (torch.tanh(x / 3.0) * 3.0).flatten(0, 1), y.flatten()
    ),
    "one row": lambda x, y: F.cross_entropy(x[1, 2], y[1, 2]),
    "rows by index": lambda x, y: F.cross_entropy(
        x[torch.tensor([0, 1]), torch.tensor([4, 0])], y[[0, 1], [4, 0]]
    ),
    "z-loss": lambda x, y: (
        x.logsumexp(-1).square().mean() + torch.logsumexp(x, dim=2, keepdim=True).sum()
    ),
    "to": lambda x, y: F.cross_entropy(x.to(torch.float64).flatten(0, 1), y.flatten()),
    "clone": lambda x, y: F.cross_entropy(x.clone().double().flatten(0, 1), y.flatten()),
}

# Losses that gather the vocabulary.
GATHERED = {
    "softmax": lambda x, y: -(x.softmax(-1).gather(-1, y.unsqueeze(-1)).log()).mean(),
    "log_softmax": lambda x, y: F.nll_loss(F.log_softmax(x, dim=-1).flatten(0, 1), y.flatten()),
    "transposed": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "weighted": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), y.flatten(), weight=torch.arange(V, dtype=x.dtype)
    ),
    "soft targets": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), F.one_hot(y.flatten(), V).to(x.dtype)
    ),
    "one column": lambda x, y: x[..., 3].mean() + x[0, 1, 2],
    "last columns": lambda x, y: x[..., -2:].sum(),
    "new last dimension": lambda x, y: x[..., None].mul(x[:, :, None, :].transpose(2, 3)).sum(),
    "flat": lambda x, y: x.view(-1).square().sum() + x.flatten().sum(),
    "cat": lambda x, y: torch.cat([x, x * x], dim=0).sum(),
    "max": lambda x, y: x.max(-1).values.sum(),
    "matmul": lambda x, y: (x @ torch.arange(V, dtype=x.dtype)).square().mean(),
    "distillation": lambda x, y: F.kl_div(
        x.log_softmax(-1), x.detach().roll(1, 0).softmax(-1), reduction="batchmean"
    ),
    "loop": lambda x, y: torch.stack([row.square().sum() for row in x]).sum(),
    "reflected": lambda x, y: (1.0 - 2.0 / (x.square() + 1.0)).sum(),
    "where": lambda x, y: torch.where(
        condition=(y > 3).unsqueeze(-1), input=x, other=torch.zeros((), dtype=x.dtype)
    ).sum(),
}


def split(full, group):
    """Return the local leaf and its logits. The value of padding would change the results."""
    words = VocabularyRange(size=full.size(-1), parts=group.size, index=group.rank)
    local = torch.full((*full.shape[:-1], words.rows), 50.0, dtype=full.dtype)
    local[..., : words.count] = full[..., words.start : words.stop]
    leaf = local.requires_grad_()
    return leaf, VocabularyParallelLogits.wrap(leaf * 1, vocabulary=words, group=group)


def check_losses(rank):
    group = tensor_group(rank)
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(3)
        full, y = torch.randn(B, S, V, dtype=dtype) * 2, torch.randint(V, (B, S))
        y[0, 3], y[1, 0] = V - 1, 4
        for name, loss in {**CHEAP, **GATHERED}.items():
            reference = full.clone().requires_grad_()
            expected = loss(reference, y)
            expected.backward()
            leaf, logits = split(full, group)
            with counted_collectives() as counts:
                got = loss(logits, y)
            assert type(got) is torch.Tensor, name
            assert ("all_gather" in counts) == (name in GATHERED), (name, counts)
            got.backward()
            words = logits.vocabulary
            limit = torch.float32 if name == "hugging face" else dtype  # it casts to float32
            assert_same(got, expected, dtype=limit)
            assert_same(
                leaf.grad[..., : words.count],
                reference.grad[..., words.start : words.stop],
                dtype=limit,
            )
            assert not leaf.grad[..., words.count :].any(), name


def check_metadata(rank):
    group = tensor_group(rank)
    full = torch.randn(B, S, V, generator=torch.Generator().manual_seed(1))
    _, logits = split(full, group)
    with counted_collectives() as counts:
        assert logits.shape == full.shape
        assert logits.size() == full.shape
        assert logits.size(-1) == logits.size(dim=2) == V
        assert logits.dim() == logits.ndim == logits.ndimension() == 3
        assert len(logits) == B
        assert logits.numel() == logits.nelement() == torch.numel(logits) == B * S * V
        assert logits.dtype is torch.float32
        assert logits.device.type == "cpu"
        assert logits.requires_grad
        assert not logits.detach().requires_grad
        assert logits.is_floating_point()
        for cheap in (
            logits.half(),
            logits.bfloat16(),
            logits[0],
            logits[:, None],
            logits[None, ..., -1:, :],
            logits[...],
            logits[:, :, :],
            logits[:, :, :, ...],
            logits[0, 1],
            logits.unflatten(1, (1, S)),
            logits.view(B, 1, S, V),
            logits.to("cpu"),
            -logits,
            2 - logits,
        ):
            assert isinstance(cheap, VocabularyParallelLogits)
            assert cheap.shape[-1] == V
        assert f"({B}, {S}, {V})" in repr(logits)
        assert f"{logits}" == str(logits) == repr(logits)
        hash(logits)
    assert not counts
    with torch.inference_mode():
        _, inside = split(full, group)
        assert_same(gather_full(inside), full)
        assert inside.flatten(0, 1).shape == (B * S, V)
    assert_same(pickle.loads(pickle.dumps(logits.detach())), full)
    assert_same(copy.deepcopy(logits.detach()), full)
    assert_same(torch.from_numpy(logits.detach().numpy()), full)


def check_argmax(rank):
    group = tensor_group(rank)
    for vocabulary in (5, 8, V):  # 5 over 4 ranks: the last has no tokens
        full = torch.randn(B, S, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
        _, logits = split(full, group)
        assert_same(logits.argmax(-1), full.argmax(-1))
        assert_same(torch.argmax(logits, dim=-1, keepdim=True), full.argmax(-1, keepdim=True))
        assert_same(logits[0, 0].argmax(-1), full[0, 0].argmax(-1))
        assert_same(logits.flatten(0, 1).argmax(dim=1), full.flatten(0, 1).argmax(1))
        assert_same(logits.argmax(1), full.argmax(1))
        assert_same(logits.argmax(), full.argmax())
        _, equal = split(torch.zeros(B, vocabulary), group)
        assert equal.argmax(-1).tolist() == [0] * B
        low = torch.full((B, vocabulary), -torch.inf)
        assert split(low, group)[1].argmax(-1).tolist() == [0] * B


@dataclass
class Output:
    """A model's output with logits and a loss."""

    logits: Any
    loss: float = 1.0


def check_outputs_and_refusals(rank):
    group = tensor_group(rank)
    full = torch.randn(B, S, V, generator=torch.Generator().manual_seed(1))
    _, logits = split(full, group)
    nested = gather_full({"a": [logits, (logits, 3)], "b": "text", "c": Output(logits), "d": None})
    for found in (nested["a"][0], nested["a"][1][0], nested["c"].logits):
        assert type(found) is torch.Tensor
        assert_same(found, full)
    assert nested["b"] == "text"
    refused = [
        lambda: logits.div_(2),
        lambda: logits.__setitem__(0, 0.0),
        lambda: logits.__itruediv__(2),
        lambda: torch.add(full, full, out=logits),
        lambda: logits.register_hook(print),
        lambda: logits.retain_grad(),
    ]
    for operation in refused:
        with pytest.raises(ValueError, match="gather_full"):
            operation()
    total = full.clone()
    assert_same(total.add_(logits.detach()), full * 2)
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(logits.flatten(0, 1), torch.full((B * S,), V))
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(logits.flatten(0, 1), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        logits.view(-1, V + 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(
            logits.bfloat16().flatten(0, 1), torch.zeros(B * S, dtype=torch.int64)
        )
    assert loss.dtype is torch.float32


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 4])
def test_losses_for_full_logits_match_single_process(pool, size):
    pool.run(check_losses, world_size=size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("check", [check_metadata, check_argmax, check_outputs_and_refusals])
def test_parallel_logits_behave_like_full_tensor(pool, check, size):
    pool.run(check, world_size=size)


def test_gather_full_keeps_plain_tensors():
    x = torch.randn(2)
    assert gather_full([x])[0] is x


@pytest.mark.parametrize(
    "index",
    [0, slice(1, 3), (..., slice(None)), None, (slice(None), None), torch.tensor([0, 1]), ()],
)
def test_index_keeps_vocabulary(index):
    """In torch such an index keeps the last dimension complete and in order."""
    x = torch.arange(24).reshape(2, 3, 4)
    items = index if isinstance(index, tuple) else (index,)
    assert keeps_vocabulary(items, 3)
    assert torch.equal(x[index].reshape(-1, 4)[0] % 4, torch.arange(4))


@pytest.mark.parametrize(
    "index",
    [
        (0, 0, 0),
        (..., 0),
        (..., None),
        (..., slice(0, 2)),
        (0, 1, slice(None), None),
        ([0],),
        (True,),
        (torch.tensor(True),),
    ],
)
def test_index_does_not_keep_vocabulary(index):
    assert not keeps_vocabulary(index, 3)


@pytest.mark.parametrize(
    ("shape", "keeps"),
    [
        ((-1, 7), True),
        ((6, -1), True),
        ((2, -1, 7), True),
        ((1, 6, 7), True),
        ((-1,), False),
        ((-1, -1), False),
        ((3, -1), False),
        ((7, 6), False),
        ((4, -1, 7), False),
        ((5, 7), False),
        ((), False),
    ],
)
@pytest.mark.parametrize("name", ["view", "reshape"])
def test_views_match_torch_and_keep_vocabulary_if_possible(name, shape, keeps):
    """A shape that torch refuses is refused here too."""
    whole = torch.arange(42.0).view(6, 7)
    logits = VocabularyParallelLogits.wrap(whole, vocabulary=VocabularyRange(size=7), group=Group())
    try:
        expected = getattr(whole, name)(shape)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            getattr(logits, name)(shape)
        return
    found = getattr(logits, name)(shape)
    assert isinstance(found, VocabularyParallelLogits) == keeps
    assert torch.equal(gather_full(found), expected)
