"""Context parallelism: one sequence split over c ranks through the whole network.

See arXiv 2310.01889 and 2309.14509. The engine uses ``ContextParallel``:

- It cuts a batch (``sequence_batch.py``).
- It replaces the model's attention by one over the full sequence (``attention/``), and other
  functions that mean something else on a slice (``slice_functions.py``).
- It gives the model the positions of its tokens (``global_positions.py``).

All other layers work on single tokens and need no change.
"""

from lightning_ptdp.context_parallel.context import ContextParallel
from lightning_ptdp.context_parallel.global_positions import why_not
from lightning_ptdp.context_parallel.sequence_batch import sequence_length

__all__ = [
    "ContextParallel",
    "sequence_length",
    "why_not",
]
