"""Reads of values that only the first stage has."""

import pytest
import torch

from lightning_ptdp.pipeline.crossing import StageError
from lightning_ptdp.pipeline.first_stage_values import FirstStageValue, Origin

READS = {
    "bool": lambda x: bool(x[0]),
    "item": lambda x: x[0].item(),
    "equal": lambda x: torch.equal(torch.zeros(2), x),
    "allclose": lambda x: x.allclose(torch.zeros(2)),
    "in": lambda x: 0.0 in x,
    "nonzero": lambda x: torch.is_nonzero(x[0]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_value_of_a_stub_is_not_read_after_the_blocks(read):
    origin = Origin(why="the first stage has it")
    stub = FirstStageValue.mark(torch.zeros(2), origin)
    read(stub)
    origin.blocks_reached = True
    with pytest.raises(StageError, match="the first stage has it"):
        read(stub)
