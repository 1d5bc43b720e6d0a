"""Expert parallelism: the experts of a mixture are shared out over ranks that read other samples,
and tokens travel to them.

Every rank has 1/e of the experts, of all tokens of its block of e ranks. A token goes to the ranks
of the experts that its router has chosen, and what they make of it comes back (arXiv 2006.16668,
section 3.2; without a capacity, no token is lost, arXiv 2211.15841)."""

from lightning_ptdp.expert_parallel.dispatch import Dispatched, Faults, dispatch
from lightning_ptdp.expert_parallel.grouped_products import (
    inner_parts,
    inner_width,
    stores_as_usual,
    usual_output,
)

__all__ = [
    "Dispatched",
    "Faults",
    "dispatch",
    "inner_parts",
    "inner_width",
    "stores_as_usual",
    "usual_output",
]
