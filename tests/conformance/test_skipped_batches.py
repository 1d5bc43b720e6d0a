"""Training steps that return None skip the batch, as in Lightning."""

import pytest

from tests.conformance.toys import (
    LitNet,
    Place,
    loader,
    make_trainer,
    metrics,
    weights,
)


class LitSkips(LitNet):
    """Skips every third batch, and the second one."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 2 or batch_idx == 1 else loss


def skip(rank, place, accumulate):
    trainer = make_trainer(place, accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    trainer.fit(LitSkips(), loader(56))
    return weights(trainer), metrics(trainer)["callback_metrics"]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_step_that_returns_none_skips_batch(accumulate, conformance):
    conformance.check(skip, "m3", accumulate)


class LitSkipsHalf(LitNet):
    def training_step(self, batch, batch_idx):
        self.calls = getattr(self, "calls", 0) + 1
        return super().training_step(batch, batch_idx) if self.calls % 2 else None


def test_none_for_some_microbatches_is_refused():
    with pytest.raises(ValueError, match=r"None.*loss times zero"):
        make_trainer(Place(layout={"num_microbatches": 2})).fit(LitSkipsHalf(), loader())
