"""Training under context parallelism against a single process, with ``Trainer.fit`` and every other
axis."""

import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging

from tests.letters import SP, A, C, M, P, R, S, T, V
from tests.tiny_gpt import Run

pytestmark = pytest.mark.thorough

LAYOUTS = {
    "c2": (2, {C: 2}),
    "c2 heads": (2, {C: 2, A: "all_to_all"}),
    "c4": (4, {C: 4}),
    "c2m4": (2, {C: 2, M: 4}),
    "d2c2": (4, {C: 2}),
    "t2c2": (4, {T: 2, C: 2}),
    "t2c2sp heads": (4, {T: 2, C: 2, SP: True, A: "all_to_all"}),
    "p2c2": (4, {P: 2, C: 2, M: 2}),
    "p2v2c2": (4, {P: 2, V: 2, C: 2, M: 2}),
    "p2v2c2 zb_v": (4, {P: 2, V: 2, C: 2, M: 2, S: "zb_v"}),
    "p2c2 full": (4, {P: 2, C: 2, M: 2, R: "full"}),
    "p2c2 selective heads": (4, {P: 2, C: 2, M: 2, S: "zb_h1", R: "selective", A: "all_to_all"}),
    "t2p2c2sp": (8, {T: 2, P: 2, C: 2, M: 2, SP: True}),
    "d2p2c2": (8, {P: 2, C: 2, M: 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gpt_with_gradient_accumulation_matches_single_process(name, parity):
    parity.check(Run(accumulate=2), LAYOUTS[name])


@pytest.mark.parametrize("name", ["c2", "d2c2", "p2v2c2"])
def test_llama_with_validation_matches_single_process(name, parity):
    parity.check(Run(llama=True, validate_every=2), LAYOUTS[name])


class Averaged(Run):
    """Validates, and ends, with an average of the weights."""

    def make_callbacks(self):
        return [EMAWeightAveraging(decay=0.7)]


@pytest.mark.parametrize("name", ["c2", "d2c2"])
def test_averaged_weights_match_single_process(name, parity):
    parity.check(Averaged(validate_every=2), LAYOUTS[name])


@pytest.mark.parametrize("name", ["c2", "c2m4", "p2c2"])
def test_mean_loss_without_token_count_matches_single_process(name, parity):
    """Sequences have no padding, so all slices have the same number of labels."""
    run = Run(count_tokens=False, ignore_padding=False, eager=True)
    parity.check(run, LAYOUTS[name])


def test_mean_loss_over_uneven_slices_matches_single_process(parity):
    parity.check(Run(count_tokens=False), LAYOUTS["c2"])


@pytest.mark.parametrize(
    ("recompute", "attention"),
    [
        ("full", "ring"),
        ("full", "all_to_all"),
        ("selective", "ring"),
        ("selective", "all_to_all"),
        ("offload", "ring"),
    ],
)
def test_recomputation_with_dropout_is_bitwise_equal(recompute, attention, parity):
    run, layout = Run(steps=2, dropout=0.2), {P: 2, C: 2, M: 2, A: attention}
    kept = parity.result(run.on((4, layout)))
    parity.check(run, (4, {**layout, R: recompute}), expected=kept, tolerance=0)
