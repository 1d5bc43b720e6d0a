"""The slowest rank of a training, and its waits."""

import re
import time
from typing import Literal

import pytest
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger

from lightning_ptdp.callbacks import Goodput, RunReport
from lightning_ptdp.strategy import PTDPStrategy
from tests.parity import make_trainer
from tests.tiny_gpt import LitTiny, Run

_LATE_S = 0.3  # the work of the slow rank, more than everything else in a step
_STEPS = 3
P2 = {"pipeline_parallel_size": 2, "num_microbatches": 2}


class LateTiny(LitTiny):
    """Model whose steps, or whose data, take longer on rank 1."""

    late: Literal["step", "data", ""] = ""

    def _work(self, kind):
        if self.late == kind and dist.get_rank() == 1:
            time.sleep(_LATE_S)

    def training_step(self, *arguments):
        self._work("step")
        return super().training_step(*arguments)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self._work("data")
        return batch


def _fit(rank, layout, late, folder):
    run, measured = Run(layers=2, steps=_STEPS), Goodput()
    trainer = make_trainer(
        PTDPStrategy(**layout),
        2,
        max_steps=_STEPS,
        logger=CSVLogger(folder, flush_logs_every_n_steps=1),
        callbacks=[measured, RunReport(f"{folder}/record-{rank}.json")],
    )
    module = LateTiny(run)
    module.late = late
    trainer.fit(module, run.make_loaders(trainer)[0])
    record = RunReport.read(f"{folder}/record-{rank}.json")
    return measured.slowest, record.lines() if record else []


@pytest.mark.parametrize("layout", [{}, P2], ids=["d2", "p2"])
def test_slowest_rank_is_named_with_its_waits(pool, layout, tmp_path):
    between = {
        late: _share_between(pool, layout, late, tmp_path / late) for late in ("step", "data")
    }
    assert between["step"] < between["data"]


def _share_between(pool, layout, late, folder):
    """Check what is said of rank 1, and return its share of time between steps, in percent."""
    (here, lines), _ = pool.run(_fit, world_size=2, args=(layout, late, str(folder)))
    found = re.fullmatch(
        r"rank 1 waited (\d+)% of the time, most for .+ \(other ranks up to (\d+)%\); "
        r"(\d+)% were between its steps \(data, validation, saves\)",
        here,
    )
    assert found is not None, here
    waited, longest, between = map(int, found.groups())
    assert waited < longest
    assert f"slowest:     {here}" in lines
    (metrics,) = folder.rglob("metrics.csv")
    names, *_, values = (line.split(",") for line in metrics.read_text().splitlines())
    row = dict(zip(names, values, strict=True))
    assert float(row["slowest_rank"]) == 1
    assert float(row["longest_wait"]) == pytest.approx(longest / 100, abs=0.01)
    return between


def test_equal_ranks_have_no_slowest_one():
    measured = Goodput()
    waits = [(1.0, {"rank 1": 2.0}), (1.0, {"rank 0": 2.4})]
    assert measured._compare(waits, 10.0) == {}
    assert measured.slowest == ""
    assert measured._compare(waits, 5.0)["slowest_rank"] == 0
