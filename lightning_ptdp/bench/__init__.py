"""Benchmarks of training steps, without real data and loggers.

``SyntheticData`` replaces the data module. ``StepTimes`` measures steps inside an ordinary
``Trainer.fit`` and writes a ``BenchResult``. ``render`` shows one result; ``table`` ranks
several."""

from lightning_ptdp.bench.measure import StepTimes
from lightning_ptdp.bench.result import BenchResult, ranked, render, table
from lightning_ptdp.bench.synthetic import SyntheticData

__all__ = ["BenchResult", "StepTimes", "SyntheticData", "ranked", "render", "table"]
