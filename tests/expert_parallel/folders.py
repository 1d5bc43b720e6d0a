"""One training of a Hugging Face mixture from a folder, a checkpoint or sizes alone, and what it
reads and writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.exchange import folder_weights
from lightning_ptdp.models import AdamWConfig, LitCausalLM
from tests.huggingface.runs import VOCABULARY, Samples

SIZES = {
    "model_type": "mixtral",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_local_experts": 4,
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training; ``folder``: whose weights it begins with."""

    layout: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    steps: int = 2
    folder: str | None = None
    resume: str | None = None
    save: str | None = None
    export: str | None = None


class Start(L.Callback):
    """The weights at the start, and whether they have been stepped on before."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.initial = trainer.strategy.gather_state_dict()


def fit(rank: int, run: Run) -> dict[str, Any]:
    """Train; the initial and the final weights of the whole model, and the bytes that were read of
    experts' files and of others."""
    L.seed_everything(3, verbose=False)
    read, fill = {"experts": 0, "others": 0}, folder_weights.read_stored

    def counted(wanted: Any) -> None:
        parts = list(wanted)
        for stored, one in parts:
            read["experts" if ".experts." in one.name else "others"] += (
                one.values.numel() * stored.entry.dtype.itemsize
            )
        fill(parts)

    folder_weights.read_stored = counted
    try:
        start = Start()
        trainer = L.Trainer(
            strategy=PTDPStrategy(**run.layout),
            accelerator="cpu",
            devices=run.world_size,
            max_steps=run.steps,
            logger=False,
            gradient_clip_val=0.5,
            callbacks=[start],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        optimizer = AdamWConfig(learning_rate=5e-3, eps=1e-3, weight_decay=0.01)
        given: dict[str, Any] = {"config": SIZES} if run.folder is None else {"path": run.folder}
        module = LitCausalLM(**given, optimizer=optimizer)
        sampler = DistributedSampler(
            Samples("labelled"), **trainer.strategy.distributed_sampler_kwargs, shuffle=False
        )
        trainer.fit(
            module,
            DataLoader(sampler.dataset, batch_size=4 // sampler.num_replicas, sampler=sampler),
            ckpt_path=run.resume,
        )
        if run.save is not None:
            trainer.save_checkpoint(run.save)
        if run.export is not None:
            trainer.strategy.export_huggingface(run.export)
        final = trainer.strategy.gather_state_dict()
    finally:
        folder_weights.read_stored = fill
    return {"initial": getattr(start, "initial", {}), "final": final, "read": read}
