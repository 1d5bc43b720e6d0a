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


class LitCounts(LitSkips):
    """Counts its tokens."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if loss is None else {"loss": loss, "num_tokens": len(batch[0])}


def skip(rank, place, kind, accumulate):
    trainer = make_trainer(place, accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    trainer.fit(kind(), loader(56))
    return weights(trainer), metrics(trainer)["callback_metrics"]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", [LitSkips, LitCounts])
def test_step_that_returns_none_skips_batch(kind, accumulate, conformance):
    conformance.check(skip, "m3", kind, accumulate)


class LitSkipsHalf(LitNet):
    def training_step(self, batch, batch_idx):
        self.calls = getattr(self, "calls", 0) + 1
        return super().training_step(batch, batch_idx) if self.calls % 2 else None


def test_none_for_some_microbatches_is_refused():
    with pytest.raises(ValueError, match=r"None.*loss times zero"):
        make_trainer(Place(layout={"num_microbatches": 2})).fit(LitSkipsHalf(), loader())


class LitCountsSome(LitNet):
    """Counts its tokens in one of two kinds of batches."""

    first = 0

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        counts = {"num_tokens": len(batch[0])} if batch_idx % 2 == self.first else {}
        return {"loss": loss, **counts}


@pytest.mark.parametrize("first", [0, 1])
def test_counts_of_some_accumulated_batches_are_refused(first):
    module = LitCountsSome()
    module.first = first
    trainer = make_trainer(Place(layout={"num_microbatches": 2}), accumulate_grad_batches=2)
    with pytest.raises(ValueError, match=r"num_tokens for some of the batches .* accumulated"):
        trainer.fit(module, loader())
