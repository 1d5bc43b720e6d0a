"""Compiled layers of a Hugging Face Llama: one graph for training and one for evaluation."""

import pytest

from tests.huggingface.runs import Run
from tests.letters import SP, T
from tests.parity import fit

pytestmark = pytest.mark.thorough

LLAMA = Run(model="llama", options=(("use_cache", False),))
COMPILED = {"compile": "blocks", "compile_options": {"backend": "aot_eager"}}


def _fit(rank, run):
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    found = fit(rank, run)
    return {
        **found,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
    }


@pytest.mark.parametrize(
    "layout", [{T: 2}, {T: 2, SP: True}, {"context_parallel_size": 2}], ids=["t2", "t2sp", "c2"]
)
def test_compiled_layer_has_no_graph_breaks(layout, parity):
    place = 2, {**layout, **COMPILED}
    for found in parity.check(LLAMA, place, tolerance=1e-4, fit=_fit):
        assert found["breaks"] == {}
        assert found["graphs"] == 2
