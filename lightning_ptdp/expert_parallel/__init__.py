"""Expert parallelism: a mixture's experts distributed over ranks that read other samples.

Every rank holds 1/e of the experts and processes these experts' tokens of its block of e ranks. A
token is sent to the ranks of the experts that its router has chosen, and their outputs are sent
back (arXiv 2006.16668, section 3.2). There is no capacity limit, so no token is dropped (arXiv
2211.15841).
"""

from lightning_ptdp.expert_parallel.dispatch import Dispatched, HostNumbers, dispatch
from lightning_ptdp.expert_parallel.grouped_products import (
    inner_parts,
    inner_width,
    stores_as_usual,
    usual_output,
)

__all__ = [
    "Dispatched",
    "HostNumbers",
    "dispatch",
    "inner_parts",
    "inner_width",
    "stores_as_usual",
    "usual_output",
]
