"""Conversations, packed or not, give the same results in every layout."""

import json
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.data import ChatDataModule
from lightning_ptdp.models import AdamWConfig, GPTConfig, LitCausalLM, LitGPT, make_tiny
from lightning_ptdp.strategy.checks.data import check_packing, why_not_packed
from tests.huggingface.chat_training import ChatTraining
from tests.huggingface.runs import LAYOUTS, make_model
from tests.optional import needs
from tests.parity import assert_near

pytestmark = [pytest.mark.thorough, needs("datasets")]

transformers = pytest.importorskip("transformers")

LENGTH = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a model, its tokenizer and prepared conversations."""
    root = tmp_path_factory.mktemp("chat")
    make_tiny(root / "llama", vocabulary_size=400, hidden_size=32, intermediate_size=48)
    with open(root / "chat.jsonl", "w") as file:
        for number in range(48):
            row = {
                "prompt": f"What is {number}?",
                "response": "So " * (number * 7 % 11 + 1) + f"{number}.",
            }
            file.write(json.dumps(row) + "\n")
    data(root, packing=False).prepare_data()
    return root


def data(root, **options):
    settings = {
        "micro_batch_size": 2,
        "num_microbatches": 2,
        "validation_fraction": 0.2,
        **options,
    }
    if "global_batch_size" in options:
        del settings["micro_batch_size"]
    return ChatDataModule(
        data_dir=str(root / "store"),
        tokenizer_dir=str(root / "llama"),
        path=str(root / "chat.jsonl"),
        sequence_length=LENGTH,
        **settings,
    )


@dataclass(frozen=True, kw_only=True)
class Chats(ChatTraining):
    packing: bool

    def make_module(self):
        optimizer = AdamWConfig(learning_rate=5e-3, eps=1e-3)
        return LitCausalLM(str(self.root / "llama"), optimizer=optimizer)

    def make_loaders(self, trainer):
        return [data(self.root, packing=self.packing, num_microbatches=2, global_batch_size=8)]


@pytest.mark.parametrize(
    ("packing", "layout"),
    [(False, "t2p2"), (True, "t2p2"), (True, "p2v2"), (True, "d2"), (True, "c2"), (True, "u2")],
)
def test_chat_training_matches_single_process(packing, layout, parity, folder):
    all_to_all = {"context_parallel_size": 2, "context_parallel_attention": "all_to_all"}
    place = (2, all_to_all) if layout == "u2" else LAYOUTS[layout]
    parity.check(Chats(root=folder, packing=packing), place)


def test_resume_within_epoch_with_fewer_replicas(parity, folder, tmp_path):
    run = Chats(root=folder, packing=True)
    parity.ranks(replace(run, saved_in=str(tmp_path)).on((2, {})))
    resumed = parity.result(replace(run, resume=str(tmp_path / "step=1.ckpt")))
    assert len(data(folder, packing=True)._stream("train")) > 8, (
        "the checkpoint is not within an epoch"
    )
    assert_near(resumed["losses"], parity.result(run)["losses"][1:], 1e-5, "losses")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "gpt_neox", "phi3"])
def test_packed_samples_match_separate_samples(name, folder, tmp_path):
    """Loss and gradients are the same with packed samples and with one sample per sequence."""
    torch.manual_seed(1)
    options = {"n_positions": LENGTH} if name == "gpt2" else {"max_position_embeddings": LENGTH}
    if name == "gemma3":
        options |= {"sliding_window": 16}
    make_model(name, vocab_size=400, **options).save_pretrained(tmp_path)
    lit = LitCausalLM(str(tmp_path))
    lit.configure_model()
    found = []
    for packing in (False, True):
        stream = data(folder, packing=packing)._stream("train")
        batch = stream.as_batch(stream.__getitems__(range(len(stream))))
        lit.zero_grad()
        losses = lit.token_losses(batch)
        loss = losses.sum() / (batch["labels"] >= 0).sum()
        loss.backward()
        found.append(
            (
                len(stream),
                loss.detach(),
                {key: value.grad.clone() for key, value in lit.named_parameters()},
            )
        )
    (samples, apart, apart_grads), (sequences, packed, packed_grads) = found
    assert sequences < samples
    torch.testing.assert_close(packed, apart, rtol=1e-6, atol=0)
    for key, value in apart_grads.items():
        assert (packed_grads[key] - value).norm() <= 1e-5 * value.norm() + 1e-7, key


class Wrapped(L.LightningModule):
    """A user's module around a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss


class Forgetful(Wrapped):
    """Passes only tokens and labels to the model."""

    def training_step(self, batch, batch_idx):
        return self.model(batch["input_ids"], labels=batch["labels"]).loss


class Inherits(LitCausalLM):
    """Overrides nothing."""


@pytest.mark.parametrize(
    "name", ["mistral", "gemma3", "qwen2_moe", "falcon", "opt", "gpt_oss", "bloom", "jamba"]
)
def test_packing_support_is_detected_from_model_code(name):
    from tests.huggingface.architectures import VOCABULARY, build

    torch.manual_seed(0)
    model = build(name).float().eval()
    model.config.use_cache = False
    tokens = torch.randint(1, VOCABULARY, (1, 12))
    places = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        packed = (
            model(input_ids=tokens, position_ids=places)
            if name not in ("bloom", "jamba")
            else model(input_ids=tokens)
        )
        apart = [model(input_ids=part).logits for part in (tokens[:, :5], tokens[:, 5:])]
    same = torch.allclose(packed.logits, torch.cat(apart, 1), atol=1e-5, rtol=1e-4)
    why = why_not_packed(Wrapped(model), Wrapped(model))
    assert (why is None) == same, why


def test_packing_without_sample_separation_is_refused(folder):
    packed = data(folder, packing=True)
    strategy = PTDPStrategy(num_microbatches=2)
    gpt = LitGPT(
        GPTConfig(
            vocabulary_size=400, sequence_length=LENGTH, num_layers=1, hidden_size=16, num_heads=2
        )
    )
    model = make_model("llama", vocab_size=400)
    with pytest.raises(
        ValueError,
        match="packing=True, but the attention of LitGPT may not separate samples",
    ):
        check_packing(gpt, packed, strategy.config)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM keeps a key cache.*config.use_cache = False"
    ):
        check_packing(Wrapped(model), packed, strategy.config)
    model.config.use_cache = False
    check_packing(Wrapped(model), packed, strategy.config)
    with pytest.raises(
        ValueError, match="Forgetful does not pass the batch's position_ids to its model"
    ):
        check_packing(Forgetful(model), packed, strategy.config)
    check_packing(Forgetful(model), data(folder, packing=False), strategy.config)
    check_packing(Inherits(str(folder / "llama")), packed, strategy.config)
    trainer = L.Trainer(
        strategy=PTDPStrategy(num_microbatches=2),
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(ValueError, match="packing=True, but the attention of LitGPT"):
        trainer.fit(gpt, packed)
