"""Weights that the user's code writes to between the optimizer's steps."""

import pytest
import torch

from tests.conformance.blocks import LAYOUTS, LitBlocks, batches
from tests.conformance.toys import DDP, ONE, LitNet, Place, assert_weights, loader, make_trainer
from tests.conformance.toys import weights as weights_of
from tests.letters import Z

LIMIT = 0.05


class Clips(LitNet):
    """Limits its weights, as critics of some GANs do."""

    writes = ""

    def write(self):
        for p in self.parameters():
            if self.writes == "data":
                p.data.clamp_(-LIMIT, LIMIT)
            elif self.writes == "in place":
                with torch.no_grad():
                    p.clamp_(-LIMIT, LIMIT)
            else:
                p.data = p.detach().clamp(-LIMIT, LIMIT)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ClipsInStep(Clips):
    def training_step(self, batch, batch_idx):
        self.write()
        return self.loss([tensor.to(self.net[0].weight.dtype) for tensor in batch])


class ClipsAfterStep(Clips):
    def on_train_batch_end(self, *_):
        self.write()

    def training_step(self, batch, batch_idx):
        return self.loss([tensor.to(self.net[0].weight.dtype) for tensor in batch])


def fit(rank, place, module, writes, precision):
    model = module()
    model.writes = writes
    trainer = make_trainer(place, precision=precision)
    trainer.fit(model, loader(batch_size=8 // place.world_size))
    return {name: value.float() for name, value in weights_of(trainer).items()}


OFFLOAD = {"offload_optimizer": True}
SHARDED = {Z: "optimizer", "bucket_mb": 1e-3}


@pytest.mark.parametrize("module", [ClipsInStep, ClipsAfterStep])
@pytest.mark.parametrize("writes", ["data", "in place", "assigned"])
@pytest.mark.parametrize(
    ("world_size", "layout", "precision"),
    [
        (1, OFFLOAD, "32-true"),
        (2, SHARDED, "32-true"),
        (2, SHARDED | OFFLOAD, "32-true"),
        (1, {}, "bf16-true"),
        (2, SHARDED, "bf16-true"),
    ],
)
def test_optimizer_continues_from_written_values(
    world_size, layout, precision, module, writes, conformance
):
    if layout.get("offload_optimizer") and (module, writes) == (ClipsInStep, "data"):
        pytest.skip("docs/precision.md names this exception")
    place = Place(world_size=world_size, layout=layout)
    found = conformance.ranks(fit, place, module, writes, precision)
    reference = ONE if world_size == 1 else DDP
    expected = conformance.expected(fit, reference, module, writes, "32-true")
    # bfloat16 has 8 bits
    tolerance = 1e-6 if precision == "32-true" else 2e-3
    for ours, theirs in zip(found, expected, strict=True):
        assert_weights(ours, theirs, tolerance=tolerance)


class ClipsMatrices(LitBlocks):
    """Limits matrices that its optimizer steps on as a whole."""

    writes = ""

    def matrices(self):
        return [p for p in self.h.parameters() if p.dim() == 2]

    def on_train_batch_end(self, *_):
        for p in self.matrices():
            if self.writes == "data":
                p.data.clamp_(-LIMIT, LIMIT)
            else:
                p.data = p.detach().clamp(-LIMIT, LIMIT)

    def configure_optimizers(self):
        return torch.optim.Adafactor(self.matrices(), lr=1e-2)


def fit_matrices(rank, place, writes):
    module = ClipsMatrices()
    module.writes = writes
    trainer = make_trainer(place, use_distributed_sampler=False)
    trainer.fit(module, batches(place, rank))
    return weights_of(trainer)


@pytest.mark.parametrize("writes", ["data", "assigned"])
def test_full_matrices_continue_from_written_values(writes, conformance):
    for found, expected in conformance.pairs(fit_matrices, LAYOUTS["t2"], writes):
        assert_weights(found, expected)
