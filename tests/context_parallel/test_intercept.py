"""Models that call ``scaled_dot_product_attention``: results on slices of the sequence, and
refusals."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.attention import ContextParallelError
from lightning_ptdp.context_parallel import ContextParallel
from lightning_ptdp.context_parallel.context import ContextForward
from lightning_ptdp.forward.surroundings import Forward, Surroundings
from tests.context_parallel.models import VOCABULARY, Encoder, Toy, local_causal_mask
from tests.context_parallel.toy import assert_close, context_group, own, sliced

pytestmark = pytest.mark.thorough

LENGTH = 16
KINDS = ["ring", "all_to_all"]


def make_batch(**more):
    generator = torch.Generator().manual_seed(0)
    return {"input_ids": torch.randint(VOCABULARY, (3, LENGTH), generator=generator), **more}


def padding(*counts):
    """Return the mask of samples with the given numbers of tokens (True: a token)."""
    return torch.arange(LENGTH) < torch.tensor(counts)[:, None]


def spread(group, make, step, batch, **options):
    """Compare output and gradients of ``step(model, batch)`` on slices with the whole sequence."""
    torch.manual_seed(0)
    model, reference = make().double(), make().double()
    reference.load_state_dict(model.state_dict())
    surroundings = Surroundings([ContextParallel(group=group, **options)])
    surroundings.attach(model)
    if isinstance(model, Toy) and isinstance(reference, Toy) and model.recompute == "ours":
        model.recompute, reference.recompute = (
            {"use_reentrant": False, "context_fn": surroundings.recomputation},
            None,
        )
    expected = step(reference, batch)
    valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    upstream = torch.randn(expected.shape, dtype=expected.dtype) * valid[..., None]
    expected.backward(upstream)
    running = Forward(hook="training_step", full_batch=batch)
    with surroundings.around(running):
        got = step(model, running.batch)
    assert isinstance(running.part, ContextForward)
    assert running.part.attention.attended
    got.backward(own(upstream, 1, group))
    seen = own(valid, 1, group)
    assert_close(got.detach()[seen], own(expected.detach(), 1, group)[seen])
    for (name, parameter), whole in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        if whole.grad is not None:
            assert parameter.grad is not None, name
            torch.distributed.all_reduce(parameter.grad, group=group.handle)
            torch.testing.assert_close(
                parameter.grad,
                whole.grad,
                rtol=1e-11,
                atol=1e-11,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def plain(model, batch):
    return model(batch["input_ids"])


def causal_by_mask(model, batch, dtype):
    return model(
        batch["input_ids"], mask=local_causal_mask(batch["input_ids"].size(1), dtype=dtype)
    )


def keys_hidden(model, batch):
    return model(batch["input_ids"], mask=batch["attention_mask"][:, None, None])


def keys_hidden_from_each(model, batch):
    """Call the model like ``keys_hidden``, with the mask expanded to every query."""
    length = batch["input_ids"].size(1)
    return model(
        batch["input_ids"], mask=batch["attention_mask"][:, None, None].expand(-1, 1, length, -1)
    )


def leaves_out_full_masks(model, batch):
    """Pass no mask for a slice without padding, like Hugging Face's models."""
    keys = batch["attention_mask"][:, None, None]
    return model(batch["input_ids"], mask=None if keys.all() else keys)


def causal_and_hidden(model, batch):
    length = batch["input_ids"].size(1)
    return model(
        batch["input_ids"], mask=batch["attention_mask"][:, None, None] & local_causal_mask(length)
    )


def changed_in_place(model, batch):
    """Use one mask buffer for all blocks: causal in the first block, then bidirectional."""
    mask = local_causal_mask(batch["input_ids"].size(1)).clone()

    def widen(*_):
        mask.fill_(True)

    hook = model.get_submodule("blocks.1").register_forward_pre_hook(widen)
    try:
        return model(batch["input_ids"], mask=mask)
    finally:
        hook.remove()


def like_its_teacher(model, batch):
    with torch.no_grad():
        target = model(batch["input_ids"])
    return model(batch["input_ids"]) * target


def given_mask(model, batch):
    return model(batch["input_ids"], mask=batch["mask"])


def encode(model, batch, causal):
    masks = {"src_key_padding_mask": ~batch["attention_mask"]} if "attention_mask" in batch else {}
    if causal:
        length = batch["input_ids"].size(1)
        masks |= {
            "mask": nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64),
            "is_causal": True,
        }
        if "src_key_padding_mask" in masks:
            masks["mask"] = masks["mask"] == -torch.inf
    return model(batch["input_ids"], **masks)


def models_on_slices(rank, kind):
    group = context_group(rank)
    generator = torch.Generator().manual_seed(5)
    random_mask = (torch.rand(3, 1, LENGTH, LENGTH, generator=generator) < 0.7) | torch.eye(
        LENGTH, dtype=torch.bool
    )
    padded, one_rank_only = (
        {"attention_mask": padding(16, 9, 3)},
        {"attention_mask": padding(16, 16, 15)},
    )
    holes = torch.zeros(3, LENGTH, dtype=torch.bool).index_fill_(
        1, torch.tensor([LENGTH // 4, *range(LENGTH - 4, LENGTH)]), True
    )
    cases = {
        "bidirectional": (Toy, plain, {}),
        "causal": (partial(Toy, is_causal=True), plain, {}),
        "without gradients": (partial(Toy, is_causal=True), like_its_teacher, {}),
        "recomputed": (partial(Toy, is_causal=True, recompute="ours"), plain, {}),
        "boolean causal mask": (Toy, partial(causal_by_mask, dtype=None), {}),
        "additive causal mask": (Toy, partial(causal_by_mask, dtype=torch.float64), {}),
        "padding": (Toy, keys_hidden, padded),
        "padding for each query": (Toy, keys_hidden_from_each, padded),
        "one token in a slice": (Toy, keys_hidden_from_each, {"attention_mask": holes}),
        "padding, on one rank": (Toy, leaves_out_full_masks, one_rank_only),
        "padding of whole slices": (Toy, causal_and_hidden, padded),
        "padding and causal": (Toy, causal_and_hidden, one_rank_only),
        "a mask without padding": (Toy, keys_hidden, {"attention_mask": padding(16, 16, 16)}),
        "one buffer for the masks": (Toy, changed_in_place, {}),
        "one buffer for the masks, padded": (Toy, changed_in_place, one_rank_only),
        "a mask of queries and keys": (Toy, given_mask, {"mask": random_mask}),
        "encoder": (Encoder, partial(encode, causal=False), {}),
        "causal encoder": (Encoder, partial(encode, causal=True), {}),
        "padded encoder": (Encoder, partial(encode, causal=False), padded),
        "padded causal encoder": (Encoder, partial(encode, causal=True), padded),
    }
    for name, (make, step, more) in cases.items():
        try:
            spread(group, make, step, make_batch(**more), attention=kind)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_models_on_slices_match_whole_sequence(pool, kind, size):
    pool.run(models_on_slices, world_size=size, args=(kind,))


# ---- refusals ------------------------------------------------------------------------------------


class Eager(Toy):
    """A model that attends without ``scaled_dot_product_attention``."""

    def forward(self, input_ids, position_ids=None, mask=None):
        x = self.tokens(input_ids)
        return self.head((x @ x.transpose(1, 2)).softmax(-1) @ x)


class CountsItself(nn.Module):
    """A model that bypasses the submodule that takes positions."""

    def __init__(self):
        super().__init__()
        self.toy = Toy()
        self.toy.forward = self.toy.forward

    def forward(self, input_ids):
        return self.toy.blocks[0](
            self.toy.tokens(input_ids) + self.toy.places(torch.arange(input_ids.size(1)))
        )


class WithoutPlaces(CountsItself):
    """A model that bypasses this submodule, and uses no positions."""

    def forward(self, input_ids):
        return self.toy.blocks[0](self.toy.tokens(input_ids))


class Counting(nn.Module):
    """A model without a module that takes positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.block = nn.Embedding(VOCABULARY, 16), Toy().blocks[0]

    def forward(self, input_ids):
        return self.block(self.tokens(input_ids))


class Mixed(Toy):
    """A model that builds its own mask."""

    def __init__(self, mask: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.make = mask

    def forward(self, input_ids, position_ids=None, mask=None):
        return super().forward(input_ids, position_ids, self.make(input_ids.size(1)))


class WithPrefix(Toy):
    """A model that prepends a token."""

    def forward(self, input_ids, position_ids=None, mask=None):
        x = self.tokens(input_ids)
        return self.blocks[0](torch.cat((x[:, :1], x), 1))


class Weights(nn.Module):
    """A model that requests the weights of ``nn.MultiheadAttention``."""

    def __init__(self):
        super().__init__()
        self.tokens, self.attention = (
            nn.Embedding(VOCABULARY, 16),
            nn.MultiheadAttention(16, 4, batch_first=True),
        )

    def forward(self, input_ids, position_ids=None):
        x = self.tokens(input_ids)
        return self.attention(x, x, x)[0]


def window(length):
    return local_causal_mask(length).triu(-2)


def slopes(length):
    return torch.arange(length).float()[None] - torch.arange(length).float()[:, None]


class Picks(Toy):
    """A model that pools one token."""

    def __init__(self, place: int) -> None:
        super().__init__(is_causal=True)
        self.place = place

    def forward(self, input_ids, position_ids=None):
        return super().forward(input_ids, position_ids)[:, self.place]


REFUSED = {
    "eager": (Eager, "calls matmul on a tensor.*attn_implementation='sdpa'"),
    "no positions": (
        Counting,
        "no module in Counting takes position_ids.*context_parallel_positions=False",
    ),
    "positions not asked": (WithoutPlaces, "called no module that takes position_ids"),
    "positions of slice": (
        CountsItself,
        r"counts positions from 0 \(embedding\), but each of 2 .*parameter position_ids",
    ),
    "window": (
        partial(Mixed, window),
        r"mask of shape \(1, 1, 8, 8\).*Each of 2 ranks has 8 of 16 tokens",
    ),
    "bias": (partial(Mixed, slopes), "has values other than 0 and -inf"),
    "whole mask": (
        partial(Mixed, lambda length: local_causal_mask(2 * length)),
        r"mask of shape \(1, 1, 16, 16\)",
    ),
    "hidden padding": (
        partial(Mixed, lambda length: torch.tensor([[True] * 3 + [False] * (length - 3)])),
        "as 'attention_mask'",
    ),
    "trained bias": (
        partial(Mixed, lambda length: torch.zeros(1, length, requires_grad=True)),
        "gradients of an attention mask",
    ),
    "both": (lambda: Toy(is_causal=True, attn_mask=torch.ones(8, 8, dtype=torch.bool)), "not both"),
    "middle token": (
        partial(Picks, 3),
        r"selects token 3 from a tensor.*Only the first \(0\)",
    ),
    "prefix": (WithPrefix, "calls cat on a tensor"),
    "reentrant": (
        lambda: Toy(is_causal=True, recompute={"use_reentrant": True}),
        r"torch\.autograd\.Function.*recompute='full'",
    ),
    "checkpoint": (
        lambda: Toy(is_causal=True, recompute={"use_reentrant": False}),
        r"inside torch\.utils\.checkpoint.*recompute='full'",
    ),
    "weights": (Weights, r"need_weights=True \(call it with need_weights=False\)"),
}


def _refuse(rank, name):
    make, _ = REFUSED[name]
    torch.manual_seed(0)
    model, context, batch = make(), ContextParallel(group=context_group(rank)), make_batch()
    with pytest.raises(ContextParallelError) as error, sliced(context, model, batch) as running:
        model(running.batch["input_ids"])
    return str(error.value)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_model_is_refused(pool, name):
    for message in pool.run(_refuse, world_size=2, args=(name,)):
        with pytest.raises(ContextParallelError, match=f"(?s){REFUSED[name][1]}"):
            raise ContextParallelError(message)


# ---- context manager -----------------------------------------------------------------------------


def _leaving(rank):
    group = context_group(rank)
    context, model, batch = ContextParallel(group=group), Toy(), make_batch()
    with pytest.raises(ContextParallelError, match="no attention"), sliced(context, model, batch):
        model.tokens(batch["input_ids"])
    model.forward = lambda ids, position_ids: position_ids
    with sliced(context, model, batch, expects_attention=False) as running:
        places = model(running.batch["input_ids"])
    assert places.tolist() == [[0, 1, 2, 3, 12, 13, 14, 15] if rank == 0 else [*range(4, 12)]]
    with pytest.raises(RuntimeError, match="mine"), sliced(context, model, batch):
        raise RuntimeError("mine")
    assert not model._forward_pre_hooks
    q = torch.randn(1, 2, 4, 8)
    assert_close(F.scaled_dot_product_attention(q, q, q), (q @ q.mT / 8**0.5).softmax(-1) @ q)


def test_context_restores_model_and_attention_on_exit(pool):
    pool.run(_leaving, world_size=2)


def _autocast(rank):
    group = context_group(rank)
    torch.manual_seed(0)
    model, batch = Toy(is_causal=True), make_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(batch["input_ids"])
        with sliced(ContextParallel(group=group), model, batch) as running:
            got = model(running.batch["input_ids"])
    assert got.dtype == expected.dtype == torch.bfloat16
    assert_close(got.float(), own(expected, 1, group).float(), torch.bfloat16)
    got.float().sum().backward()
    q = torch.randn(1, 2, LENGTH // 2, 8)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        sliced(ContextParallel(group=group), model, batch, expects_attention=False),
    ):
        assert model(batch["input_ids"][:, : LENGTH // 2]).dtype == torch.bfloat16
        assert F.scaled_dot_product_attention(q, q, q).dtype == torch.bfloat16


def test_autocast_output_matches_single_process(pool):
    pool.run(_autocast, world_size=2)


def _pick(rank, place):
    group = context_group(rank)
    torch.manual_seed(0)
    model, batch = Picks(place).double(), make_batch()
    expected = model(batch["input_ids"])
    whole = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    with sliced(ContextParallel(group=group), model, batch) as running:
        found = model(running.batch["input_ids"])
    assert_close(found.detach(), expected.detach())
    # Every rank has the whole loss and counts its part of it.
    parts = torch.autograd.grad(found.square().sum() / group.size, list(model.parameters()))
    for mine, gradient in zip(parts, whole, strict=True):
        dist.all_reduce(mine, group=group.handle)
        assert_close(mine, gradient)


@pytest.mark.parametrize("place", [0, -1])
def test_first_and_last_token_are_those_of_whole_sequence(place, pool):
    pool.run(_pick, world_size=2, args=(place,))
