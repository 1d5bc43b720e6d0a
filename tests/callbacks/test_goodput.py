"""Share of wall time in steps that counted, over restarts."""

from pathlib import Path

import lightning.pytorch as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_ptdp.callbacks import Goodput, step_metrics
from tests.callbacks.toys import Tokens


class Clock:
    """Clock of both kinds, which the test advances."""

    now = 1000.0

    def time(self):
        return self.now

    perf_counter = time


class Timed(Tokens):
    """Module whose training step takes 2 s and whose loading of each batch takes 1 s."""

    def __init__(self, clock: Clock, *, fail_at: int | None = None) -> None:
        super().__init__()
        self.clock, self.fail_at = clock, fail_at

    def on_before_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training:
            self.clock.now += 1
        return batch

    def training_step(self, batch, batch_idx):
        self.clock.now += 2
        if batch_idx == self.fail_at:
            raise RuntimeError("lost")
        return super().training_step(batch, batch_idx)


def test_share_counts_steps_of_final_model(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(step_metrics, "time", clock)

    def fit(*, began, path=None, fail_at=None):
        measured = Goodput()
        measured._began = began
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=6,
            limit_val_batches=0,
            logger=CSVLogger(tmp_path / "logs"),
            callbacks=[
                measured,
                ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}"),
            ],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Timed(clock, fail_at=fail_at), ckpt_path=path)
        return trainer

    with pytest.raises(RuntimeError, match="lost"):
        fit(began=990.0, fail_at=3)  # 10 s of imports; steps 0 and 1 are saved, 2 and 3 are lost
    assert clock.now == 1000 + 4 * 3
    clock.now += 100  # until the restart
    trainer = fit(began=1105.0, path=str(tmp_path / "step=2.ckpt"))
    assert clock.now == 1112 + 4 * 3
    share = 6 * 2 / (clock.now - 990)
    assert [c.share for c in trainer.callbacks if isinstance(c, Goodput)] == [share]
    metrics = (Path(trainer.loggers[0].log_dir) / "metrics.csv").read_text().splitlines()
    column = metrics[0].split(",").index("goodput")
    assert float(metrics[-1].split(",")[column]) == pytest.approx(share)
