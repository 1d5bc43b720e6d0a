"""Training with keyed dropout, which is numerically equal in every layout."""

from dataclasses import replace

import pytest

from tests.letters import SP, C, M, P, R, S, T, V
from tests.pool import WorkerFailure
from tests.tiny_gpt import Run

pytestmark = pytest.mark.thorough

RUN = Run(dropout=0.2, steps=2, layout={"keyed_dropout": True})
LAYOUTS = {
    "m4": (1, {M: 4}),
    "d2": (2, {}),
    "t2": (2, {T: 2}),
    "t2sp": (2, {T: 2, SP: True}),
    "t4": (4, {T: 4}),
    "p2v2": (2, {P: 2, V: 2, M: 4}),
    "p2 full": (2, {P: 2, M: 4, R: "full"}),
    "t2 selective": (2, {T: 2, R: "selective"}),
    "t2p2v2sp zb_v full": (4, {T: 2, P: 2, V: 2, M: 4, SP: True, S: "zb_v", R: "full"}),
    "d2t2p2": (8, {T: 2, P: 2, M: 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_equals_single_process(name, parity):
    parity.check(RUN, LAYOUTS[name])


def test_dropout_changes_losses(parity):
    dropped, kept = parity.result(RUN), parity.result(Run(steps=2))
    assert dropped["losses"] != pytest.approx(kept["losses"], rel=1e-5)


def test_attention_dropout_with_context_parallel_is_refused(parity):
    with pytest.raises(WorkerFailure, match="keyed_dropout=True with attention dropout"):
        parity.ranks(replace(RUN, steps=1).on((2, {C: 2})))
