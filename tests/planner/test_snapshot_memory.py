"""Memory that the planner expects for snapshots, beside the bytes of a real one."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_ptdp.models import GPTConfig, LitGPT
from lightning_ptdp.planner import Job, find_device, find_precision, search
from lightning_ptdp.planner.plan_report import as_data, table
from lightning_ptdp.strategy import PTDPStrategy
from tests.parity import make_trainer

SIZES = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "sequence_length": 32}


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_plan_shows_host_memory_of_snapshots(precision, tmp_path):
    config = GPTConfig.gpt2(vocabulary_size=512, **SIZES)
    ids = torch.zeros(2, 32, dtype=torch.long)
    batches = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)
    trainer = make_trainer(
        PTDPStrategy(checkpoint_format="folder"),
        max_steps=1,
        precision=precision,
        callbacks=[ModelCheckpoint(tmp_path, save_last=True)],
    )
    trainer.fit(LitGPT(config), batches)
    written = sum(path.stat().st_size for path in (tmp_path / "last.ckpt").glob("*.safetensors"))
    job = Job(
        model=config,
        world_size=1,
        global_batch_size=2,
        device=find_device("cpu"),
        precision=find_precision(precision),
    )
    assert job.snapshot_bytes == pytest.approx(written, rel=0.03)
    plan = search(job)
    gib = written / 2**30
    (line,) = [line for line in table(plan).splitlines() if "snapshot_every_n_steps" in line]
    shm, buffers = (float(part.split()[-1]) for part in line.rpartition(": ")[2].split(","))
    assert shm == pytest.approx(2 * gib, rel=0.05)
    assert buffers == pytest.approx(gib, rel=0.05)
    assert as_data(plan)["job"]["snapshot_bytes"] == job.snapshot_bytes
