"""Tests of checkpoints in object storage, against a real S3 server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ptdp.checkpoint import complete_checkpoints
from tests.checkpoint.s3_server import serving
from tests.parity import make_trainer
from tests.pool import Pool
from tests.tiny_gpt import Run

pytestmark = pytest.mark.thorough

ROOT = "s3://bucket"
SETTINGS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION")
ONE: dict[str, Any] = {}
T2 = {"tensor_parallel_size": 2}
P2 = {"pipeline_parallel_size": 2, "num_microbatches": 2}
D2 = {"shard": "optimizer"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving() as address:
        yield address


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in SETTINGS}


def _fit(
    rank: int, layout: dict[str, Any], world_size: int, root: str, steps: int, resume: str | None
) -> dict[str, torch.Tensor]:
    from lightning_ptdp.strategy import PTDPStrategy

    run = Run(layers=2, steps=steps)
    strategy = PTDPStrategy(checkpoint_format="folder", **layout)
    saver = ModelCheckpoint(every_n_train_steps=2, save_top_k=1, save_last=True)
    trainer = make_trainer(
        strategy, world_size, max_steps=steps, default_root_dir=root, callbacks=[saver]
    )
    L.seed_everything(1)
    trainer.fit(run.make_module(), run.make_loaders(trainer)[0], ckpt_path=resume)
    return dict(trainer.strategy.gather_state_dict())


def test_training_saves_and_resumes_under_an_address_in_any_layout(
    pool: Pool, server: str, tmp_path: Path
) -> None:
    def fit(root: str, *runs: tuple[dict[str, Any], int, str | None]) -> Any:
        found: Any = None
        for number, (layout, world_size, resume) in enumerate(runs):
            arguments = (layout, world_size, root, 2 * number + 2, resume)
            found = pool.run(_fit, world_size=world_size, args=arguments, env=_environment())[0]
        return found

    last = "checkpoints/last.ckpt"
    root = f"{ROOT}/resumed"
    found = fit(root, (T2, 2, None), (P2, 2, "last"), (D2, 2, f"{root}/{last}"))
    local = str(tmp_path)
    expected = fit(local, (ONE, 1, None), (ONE, 1, f"{local}/{last}"), (ONE, 1, f"{local}/{last}"))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
    names = {path.name for path in complete_checkpoints(root, recursive=True)}
    assert names == {"last.ckpt", "epoch=0-step=6.ckpt"}  # of the best ones, one is kept
