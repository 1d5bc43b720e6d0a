"""Unmodified Hugging Face models on slices of the sequence: positions, masks and shifted labels."""

import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.attention import ContextParallelError
from lightning_ptdp.context_parallel import ContextParallel
from tests.context_parallel.toy import assert_close, context_group, own, sliced, weighted

pytest.importorskip("transformers")

LENGTH, VOCABULARY = 16, 53
ROTARY = {
    "longrope": {
        "max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "factor": 4.0,
            "rope_theta": 100.0,
            "short_factor": [1.0, 1.0],
            "long_factor": [4.0, 4.0],
            "original_max_position_embeddings": 13,
        },
    },
}
"""Options of rotary embeddings that depend on the length of the whole sequence.

Dynamic ones would keep the length of the process before, so they would show nothing here."""


def make_model(name):
    """Return a small model. transformers is imported here, in the worker."""
    import transformers

    common = {"vocab_size": VOCABULARY, "attn_implementation": "sdpa"}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16,
            n_layer=2,
            n_head=4,
            n_positions=32,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            use_cache=False,
            **common,
        )
        return transformers.GPT2LMHeadModel(config)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
    } | common
    if name == "bert":
        config = transformers.BertConfig(
            hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes
        )
        return transformers.BertForPreTraining(config)
    if name == "roberta":
        config = transformers.RobertaConfig(
            hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes
        )
        return transformers.RobertaForMaskedLM(config)
    window = {"sliding_window": 8} if name == "mistral" else ROTARY.get(name, {})
    kind = transformers.MistralForCausalLM if name == "mistral" else transformers.LlamaForCausalLM
    return kind(kind.config_class(num_key_value_heads=2, use_cache=False, **sizes, **window))


def make_batch(lengths):
    """Return three sequences, padded after the given lengths."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (3, LENGTH), generator=generator)
    if lengths is None:
        return {"input_ids": ids, "labels": ids.clone()}
    valid = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(~valid, -100),
        "attention_mask": valid.long(),
    }


def _train_step(rank, name):
    group = context_group(rank)
    # The last lengths pad on rank 0 only. There some models copy key/value heads and pass a mask,
    # which other ranks omit. A repeated attention knows its mask from its first forward.
    every = {
        attention: ContextParallel(group=group, attention=attention)
        for attention in ("ring", "all_to_all")
    }
    torch.manual_seed(0)
    model = make_model(name).double()
    for attention, lengths, known in (
        ("all_to_all", None, False),
        ("ring", (16, 11, 3), False),
        ("ring", (16, 16, 14), True),
        ("ring", None, True),
        ("all_to_all", (16, 16, 16), True),
    ):
        batch = make_batch(lengths)
        if name == "bert":  # its sentence head pools the first token, which only one rank has
            batch["next_sentence_label"] = torch.tensor([0, 1, 1])
        expected = model(**batch)
        loss = expected.loss
        whole = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

        with sliced(every[attention], model, batch) as running:
            output = model(**running.batch)
        assert (running.known is not None) == known
        assert running.attention.attended
        local, count = output.loss, running.num_targets
        assert count is not None
        local = weighted(running, local) / group.size
        found = torch.autograd.grad(local, list(model.parameters()), allow_unused=True)
        dist.all_reduce(local := local.detach(), group=group.handle)
        assert_close(local, loss.detach())
        for (label, _), mine, expected_grad in zip(
            model.named_parameters(), found, whole, strict=True
        ):
            assert (mine is None) == (expected_grad is None), label
            if mine is not None:
                dist.all_reduce(mine, group=group.handle)
                # Hugging Face computes the loss in float32 for every dtype of the model.
                torch.testing.assert_close(
                    mine, expected_grad, rtol=1e-6, atol=1e-8, msg=lambda t, n=label: f"{n}: {t}"
                )
        logits, whole_logits = _logits(output), own(_logits(expected), 1, group)
        seen = own(
            batch.get("attention_mask", torch.ones_like(batch["input_ids"])), 1, group
        ).bool()
        assert_close(logits.detach()[seen], whole_logits.detach()[seen])


def _logits(output):
    return output.prediction_logits if hasattr(output, "prediction_logits") else output.logits


def _train_with_mask_of_pairs(rank):
    group = context_group(rank)
    torch.manual_seed(0)
    model = make_model("llama").double()
    parallel = ContextParallel(group=group)
    halves = torch.block_diag(*(torch.ones(LENGTH // 2, LENGTH // 2).tril() for _ in range(2)))
    pairs = halves.bool()[None, None].expand(3, 1, -1, -1)
    for mask in ({}, {"attention_mask": pairs}):
        batch = {**make_batch(None), **mask}
        loss = model(**batch).loss.detach()
        with sliced(parallel, model, batch) as running:
            local = model(**running.batch).loss
        local = weighted(running, local).detach() / group.size
        dist.all_reduce(local, group=group.handle)
        assert_close(local, loss)


def test_mask_of_queries_and_keys_is_not_replaced_by_known_one(pool):
    pool.run(_train_with_mask_of_pairs, world_size=2)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "roberta", *ROTARY])
def test_hugging_face_model_matches_single_process(pool, name):
    pool.run(_train_step, world_size=2, args=(name,))


def _train_with_number_of_labels(rank):
    group = context_group(rank)
    torch.manual_seed(0)
    model = make_model("llama").double()
    parallel, batch = ContextParallel(group=group), make_batch(None)

    def loss_of(part, start):
        count = (part["labels"][:, start:] != -100).sum()
        return model(**part, num_items_in_batch=count).loss

    with sliced(parallel, model, batch) as running:
        local = loss_of(running.batch, start=0)
    local = weighted(running, local).detach() / group.size
    dist.all_reduce(local, group=group.handle)
    assert_close(local, loss_of(batch, start=0).detach())
    with (
        pytest.raises(ContextParallelError, match="takes tokens"),
        sliced(parallel, model, batch) as running,
    ):
        loss_of(running.batch, start=1)


def test_number_of_labels_that_divides_loss_matches_single_process_or_is_refused(pool):
    pool.run(_train_with_number_of_labels, world_size=2)


def _refusals(rank):
    group, messages = context_group(rank), []
    for name, change in (("mistral", {}), ("llama", {"attn_implementation": "eager"})):
        model = make_model(name)
        if change:
            model.set_attn_implementation("eager")
        with (
            pytest.raises(ContextParallelError) as error,
            sliced(ContextParallel(group=group), model, make_batch(None)) as f,
        ):
            model(**f.batch)
        messages.append(str(error.value))
    return messages


def test_sliding_window_and_eager_attention_are_refused(pool):
    window, eager = pool.run(_refusals, world_size=2)[0]
    assert "sliding_window=8" in window
    assert "attn_implementation='sdpa'" in eager
