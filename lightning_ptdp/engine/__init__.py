"""One batch of one replica: cut into microbatches, run by the schedule, reported to Lightning.

``engine.py`` is the entrance; ``job.py`` runs the user's step on a microbatch, ``report.py`` puts together what the microbatches say and
``sharing.py`` carries it to the other ranks, with what the step left on the module (``step_state.py``); ``batch.py`` cuts and joins,
``agreement.py`` and ``metric_groups.py`` see that all ranks mean the same.
"""

from lightning_ptdp.engine.agreement import BatchMismatchError
from lightning_ptdp.engine.engine import Engine

__all__ = ["BatchMismatchError", "Engine"]
