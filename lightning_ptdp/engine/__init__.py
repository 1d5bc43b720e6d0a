"""Training steps of one replica: microbatches, the user's step, one result for Lightning.

- ``engine.py`` is the entry point.
- ``microbatches.py`` splits a batch and merges the outputs.
- ``replica_step.py`` runs the user's step on a microbatch.
- ``step_report.py`` combines the results of the microbatches. ``sharing.py`` sends them to the
  other ranks, together with the state that the step left on the module (``step_state.py``).
- ``rank_agreement.py`` and ``metric_groups.py`` check that all ranks agree.
"""

from lightning_ptdp.engine.engine import Engine
from lightning_ptdp.engine.rank_agreement import BatchMismatchError

__all__ = ["BatchMismatchError", "Engine"]
