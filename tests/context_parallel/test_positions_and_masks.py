"""Tests of inputs that a model cannot derive from its slice of the sequence.

These are positions and masks. The tests emulate one rank of two, without communication.
"""

import pytest
import torch
from torch import nn

from lightning_ptdp.context_parallel import ContextParallel
from lightning_ptdp.world.mesh import Group
from tests.context_parallel.toy import sliced

PLACES = [[2, 3, 4, 5]]
BATCH = {"input_ids": torch.arange(16).view(2, 8)}


class Reader(nn.Module):
    """A model that returns its positions and its mask."""

    def forward(self, input_ids, position_ids=None, attention_mask=None):
        return None if position_ids is None else position_ids.tolist(), attention_mask


class LikeHuggingFace(Reader):
    """A model recognized as one of Hugging Face by ``main_input_name``."""

    main_input_name = "input_ids"


def context(**options):
    return ContextParallel(group=Group(handle=None, ranks=(0, 1), rank=1), **options)


def test_missing_positions_are_supplied():
    model = nn.Sequential(Reader())
    with sliced(context(), model, BATCH, expects_attention=False) as running:
        ids = running.batch["input_ids"]
        assert model[0](ids) == (PLACES, None)
        assert model[0](ids, None) == (PLACES, None)
        assert model[0](ids, torch.zeros(1, 4)) == ([[0, 0, 0, 0]], None)
        assert model[0](input_ids=ids, position_ids=None) == (PLACES, None)
    assert model[0](ids) == (None, None)


def test_position_ids_of_batch_are_cut():
    batch = {**BATCH, "position_ids": torch.arange(8).flip(0).expand(2, -1)}
    with sliced(context(), nn.Linear(1, 1), batch, expects_attention=False) as running:
        assert running.batch["position_ids"].tolist() == [[5, 4, 3, 2]] * 2


def test_model_without_positions_is_accepted():
    with sliced(
        context(needs_positions=False), nn.Linear(1, 1), BATCH, expects_attention=False
    ) as running:
        assert running.batch["input_ids"].shape == (2, 4)


def test_hugging_face_model_gets_attention_mask():
    model = LikeHuggingFace()
    with sliced(context(), model, BATCH, expects_attention=False) as running:
        places, mask = model(running.batch["input_ids"])
        assert torch.equal(mask, torch.ones(2, 4))
        assert model(running.batch["input_ids"], attention_mask=mask * 2)[1].unique().tolist() == [
            2
        ]
    assert places == PLACES


def test_documents_in_position_ids_become_mask():
    """The documents have 3 and 5 tokens. This rank has tokens 2 to 5, and only token 2 is in the
    first document."""
    model, places = LikeHuggingFace(), torch.arange(8).expand(2, -1)
    parallel = context()
    with sliced(
        parallel, model, {**BATCH, "position_ids": places}, expects_attention=False
    ) as running:
        assert torch.equal(model(**running.batch)[1], torch.ones(2, 4))
    anew = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(2, -1)
    with sliced(
        parallel, model, {**BATCH, "position_ids": anew}, expects_attention=False
    ) as running:
        mask = model(**running.batch)[1]
        assert model(**running.batch, attention_mask=mask[:1])[1].shape == (1, 1, 4, 8), (
            "a given mask is replaced"
        )
    seen = [[0, 1, 2], [3], [3, 4], [3, 4, 5]]
    assert mask.shape == (2, 1, 4, 8)
    assert [row.nonzero().flatten().tolist() for row in mask[1, 0]] == seen
    with sliced(
        parallel, model, {**BATCH, "position_ids": places}, expects_attention=False
    ) as running:  # the positions are no longer read
        assert model(**running.batch)[1].sum(-1)[0, 0].tolist() == [3, 4, 5, 6]


def test_indivisible_sequence_is_refused_before_step():
    with (
        pytest.raises(ValueError, match="multiple of 4"),
        sliced(context(), Reader(), {"input_ids": torch.zeros(1, 6)}),
    ):
        pytest.fail("the step ran")


@pytest.mark.parametrize(
    ("calls", "known"),
    [({(True, 2)}, True), ({(True, 2), (False, 2)}, False), ({(True, 2), (True, 4)}, False)],
    ids=["alike", "causal or not", "numbers of heads"],
)
def test_mask_is_known_only_if_all_calls_were_alike(calls, known):
    parallel, model = context(), LikeHuggingFace()
    for _ in range(2):
        with sliced(parallel, model, BATCH, expects_attention=False) as running:
            model(running.batch["input_ids"])
            running.attention.seen |= calls
    assert (running.known is not None) == known


def test_padding_is_seen_in_mask_at_address_or_in_storage_of_full_mask():
    surrounding = context(needs_positions=False)
    surrounding.attach(nn.Linear(1, 1))
    ids = torch.zeros(4, 1024, dtype=torch.long)
    padding = torch.arange(1024).expand(4, -1) < 512

    def sees_padding(masks):
        batch = {"input_ids": ids} | masks
        return surrounding._begin(batch, set()).attention.padded

    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    surrounding.moved(batch, batch)
    assert not sees_padding({"attention_mask": batch["attention_mask"]})
    del batch
    # The allocator reuses memory: these masks would be at the address of the full one.
    masks = [padding.long() for _ in range(3)]
    assert all(sees_padding({"attention_mask": mask}) for mask in masks)

    both = torch.stack([torch.ones_like(ids), padding.long()])
    batch = {"input_ids": ids, "padding_mask": both[0], "attention_mask": both[1]}
    surrounding.moved(batch, batch)
    assert sees_padding({"attention_mask": both[1]})
