"""A training that every launcher runs: ``launched_script.py FOLDER DEVICES NODES``.

Rank 0 writes the final weights to ``FOLDER/weights.json``, bit by bit.
"""

import json
import sys
from pathlib import Path

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.models import AdamWConfig, GPTConfig, LitGPT

STEPS = 6


def main() -> None:
    folder, devices, nodes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    L.seed_everything(1, verbose=False)
    sizes = {"num_layers": 4, "hidden_size": 32, "num_heads": 4}
    config = GPTConfig.gpt2(vocabulary_size=64, sequence_length=16, dropout=0.1, **sizes)
    ids = torch.randint(64, (48, 17), generator=torch.Generator().manual_seed(1))
    samples = [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]
    trainer = L.Trainer(
        strategy=PTDPStrategy(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            num_microbatches=2,
            timeout_s=120,
        ),
        accelerator="cpu",
        devices=devices if devices == "auto" else int(devices),
        num_nodes=nodes,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(LitGPT(config, AdamWConfig(learning_rate=5e-3)), DataLoader(samples, batch_size=8))
    weights = trainer.strategy.gather_state_dict()
    if trainer.is_global_zero:
        text = {name: value.numpy().tobytes().hex() for name, value in weights.items()}
        (folder / "weights.json").write_text(json.dumps(text))


if __name__ == "__main__":
    main()
