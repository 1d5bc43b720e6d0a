"""One batch of one replica: cut into microbatches, run by the schedule, reported to Lightning.

``engine.py`` is the entrance; ``job.py`` runs the user's step on a microbatch, ``report.py`` carries what the last stage says to the
other ranks, ``batch.py`` cuts and joins, ``agreement.py`` and ``metric_groups.py`` see that all ranks mean the same.
"""

from lightning_ptdp.engine.agreement import BatchMismatchError
from lightning_ptdp.engine.engine import Engine

__all__ = ["BatchMismatchError", "Engine"]
