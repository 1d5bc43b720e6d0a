"""Encoder-decoders under a pipeline: both stacks in one cut, with the same answer as one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.huggingface.runs import Run
from tests.huggingface.test_training import check, reference  # noqa: F401 - a fixture
from tests.pool import Pool

pytest.importorskip("transformers")

SMALL = (("num_layers", 2), ("num_decoder_layers", 2))


@pytest.mark.parametrize("layout", ["p2", "p2v2", "p4", "t2", "t2p2", "t4"])
@pytest.mark.parametrize("model", ["t5", "bart"])
def test_same_answer_as_one_process(model: str, layout: str, pool: Pool, reference: Any) -> None:  # noqa: F811
    check(pool, reference, Run(model=model), layout)
