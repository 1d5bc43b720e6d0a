"""Conversations alone and packed: one process apart, and every layout, compute the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.data import ChatDataModule
from lightning_ptdp.models import AdamWConfig, LitCausalLM, make_tiny
from tests.huggingface.runs import LAYOUTS, Recorder, make_model
from tests.pool import Pool

transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")

LENGTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, and conversations of different lengths, prepared."""
    root = tmp_path_factory.mktemp("chat")
    make_tiny(root / "llama", vocabulary_size=400, hidden_size=32, intermediate_size=48)
    with open(root / "chat.jsonl", "w") as file:
        for number in range(48):
            row = {"prompt": f"What is {number}?", "response": "So " * (number * 7 % 11 + 1) + f"{number}."}
            file.write(json.dumps(row) + "\n")
    data(root, packing=False).prepare_data()
    return root


def data(root: Path, **options: Any) -> ChatDataModule:
    settings: dict[str, Any] = {"micro_batch_size": 2, "num_microbatches": 2, "validation_fraction": 0.2, **options}
    if "global_batch_size" in options:
        del settings["micro_batch_size"]
    return ChatDataModule(
        data_dir=str(root / "store"),
        tokenizer_dir=str(root / "llama"),
        path=str(root / "chat.jsonl"),
        sequence_length=LENGTH,
        **settings,
    )


def fit(rank: int, root: Path, packing: bool, layout: dict[str, Any], world_size: int, steps: int = 3) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    strategy = PTDPStrategy(**layout)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=world_size, max_steps=steps, gradient_clip_val=0.5, callbacks=[recorder],
        logger=False, enable_checkpointing=False, num_sanity_val_steps=0, val_check_interval=steps, check_val_every_n_epoch=None,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = LitCausalLM(str(root / "llama"), optimizer=AdamWConfig(learning_rate=5e-3, eps=1e-3))
    trainer.fit(module, data(root, packing=packing, num_microbatches=2, global_batch_size=8))
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "validation": [float(trainer.callback_metrics["val_loss"])],
        "final": strategy.gather_state_dict(),
    }


@pytest.fixture(scope="module")
def alone(pool: Pool, folder: Path) -> dict[bool, Any]:
    return {
        packing: pool.run(fit, world_size=1, args=(folder, packing, {"num_microbatches": 2}, 1))[0] for packing in (False, True)
    }


@pytest.mark.parametrize(
    ("packing", "layout"),
    [(False, "t2p2"), (True, "t2p2"), (True, "p2v2"), (True, "d2"), (True, "c2"), (True, "u2")],
)
def test_every_layout_trains_alike(packing: bool, layout: str, pool: Pool, folder: Path, alone: dict[bool, Any]) -> None:
    c2 = {"context_parallel_size": 2}
    world_size, degrees = {**LAYOUTS, "u2": (2, {**c2, "context_parallel_attention": "all_to_all"})}[layout]
    found = pool.run(fit, world_size=world_size, args=(folder, packing, {"num_microbatches": 2, **degrees}, world_size))[0]
    expected = alone[packing]
    for key in ("losses", "norms", "validation"):
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(expected[key]), rtol=1e-5, atol=0)
    for name, value in expected["final"].items():
        difference = (found["final"][name] - value).norm() / value.norm().clamp(min=1e-3)
        assert difference < 1e-5, f"{name} ends {difference:.1e} away"


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "gpt_neox", "phi3"])
def test_packed_samples_are_as_if_they_were_apart(name: str, folder: Path, tmp_path: Path) -> None:
    """The loss and every gradient of all samples, packed and each in a sequence of its own."""
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
        found.append((len(stream), loss.detach(), {key: value.grad.clone() for key, value in lit.named_parameters()}))
    (samples, apart, apart_grads), (sequences, packed, packed_grads) = found
    assert sequences < samples
    torch.testing.assert_close(packed, apart, rtol=1e-6, atol=0)
    for key, value in apart_grads.items():
        assert (packed_grads[key] - value).norm() <= 1e-5 * value.norm() + 1e-7, key
