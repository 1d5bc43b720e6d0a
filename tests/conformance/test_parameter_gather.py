"""Parameters of a sharded optimizer that are read before they have arrived."""

import copy
from contextlib import nullcontext
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.nn.functional import linear

from lightning_ptdp.data_parallel import reduction
from lightning_ptdp.engine import engine
from tests.conformance.toys import FEATURES, LitNet, Losses, Place, loader, make_trainer, weights


class LateGather:
    """A gather that starts when it is waited for, and writes NaN in place of old values before."""

    def __init__(self, buffer, group):
        self.arguments = buffer, group
        own = reduction._own_part(buffer, group)
        kept = own.clone()
        buffer.fill_(torch.nan)
        own.copy_(kept)

    def wait(self):
        plain(*self.arguments).wait()


plain = reduction.start_all_gather
DDP = Place(world_size=2, reference="ddp_find_unused_parameters_true")


class PenaltyFirst(LitNet):
    def loss(self, batch):
        penalty = sum(p.square().sum() for p in self.parameters())
        return super().loss(batch) + 0.01 * penalty


class AddressFirst(LitNet):
    """Gives a kernel the address of a weight."""

    def loss(self, batch):
        for p in self.net.parameters():
            p.data_ptr()
            assert p.__torch_function__ is torch.nn.Parameter.__torch_function__
        return super().loss(batch)


class HeadIsNotCalled(LitNet):
    def loss(self, batch):
        *blocks, head = self.net
        x, y = batch
        for block in blocks:
            x = block(x)
        return (linear(x, head.weight, head.bias) - y).square().mean()


class Scripted(LitNet):
    """Has layers that read their weights without Python."""

    def __init__(self):
        super().__init__()
        inner = torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.Tanh())
        self.first = torch.jit.trace(inner, torch.zeros(1, FEATURES))

    def loss(self, batch):
        return super().loss((self.first(batch[0]), batch[1]))


class Monitor(LitNet):
    """Reads parameters between the steps, on one rank."""

    def on_train_batch_end(self, *_):
        if self.global_rank == 0:
            assert sum(p.sum() for p in self.parameters()).isfinite()

    def on_before_zero_grad(self, optimizer):
        assert torch._foreach_norm(list(self.parameters()))[0].isfinite()


class Copies(LitNet):
    """Uses a copy of its layers between the steps, such as the best ones so far."""

    def on_train_batch_end(self, *_):
        assert copy.deepcopy(self.net)(torch.ones(1, FEATURES)).isfinite()


class Spare(LitNet):
    """Has a layer that no step uses."""

    def __init__(self):
        super().__init__()
        self.spare = torch.nn.Linear(2, 2)


class Marked(torch.nn.Parameter):
    def scaled(self):
        return 0.9 * self


class OwnClass(LitNet):
    def __init__(self):
        super().__init__()
        self.net[0].bias = Marked(self.net[0].bias.detach())

    def loss(self, batch):
        return super().loss(batch) + self.net[0].bias.scaled().sum()


def fit(rank, place, module, late, averages):
    losses = Losses()
    callbacks = [losses, EMAWeightAveraging(decay=0.7)] if averages else [losses]
    gathers = (
        mock.patch.object(reduction, "start_all_gather", LateGather) if late else nullcontext()
    )
    with gathers:
        trainer = make_trainer(place, callbacks=callbacks)
        trainer.fit(module(), loader())
        return losses.values, weights(trainer)


@pytest.mark.parametrize(
    ("module", "layout", "late", "averages"),
    [
        (LitNet, {}, True, False),
        (PenaltyFirst, {}, True, False),
        (PenaltyFirst, {"shard": "gradients"}, True, False),
        (PenaltyFirst, {"overlap_parameter_gather": False}, True, False),
        (AddressFirst, {}, True, False),
        (HeadIsNotCalled, {}, True, False),
        (Scripted, {}, True, False),
        (Scripted, {"shard": "parameters"}, False, False),
        (Monitor, {}, False, False),
        (Copies, {}, True, False),
        (Spare, {}, True, False),
        (OwnClass, {}, True, False),
        (LitNet, {}, True, True),
        (
            PenaltyFirst,
            {"compile": "blocks", "compile_options": {"backend": "eager"}},
            True,
            False,
        ),
    ],
)
def test_reads_wait_for_gathers(module, layout, late, averages, conformance):
    place = Place(world_size=2, layout={"shard": "optimizer", "bucket_mb": 1e-3, **layout})
    found = conformance.ranks(fit, place, module, late, averages)
    expected = conformance.expected(fit, DDP, module, False, averages)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
        for name, value in theirs[1].items():
            torch.testing.assert_close(ours[1][name], value, rtol=1e-5, atol=1e-6)


class Branches(L.LightningModule):
    """Counts its tokens, and uses another branch in every replica."""

    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(FEATURES, FEATURES)
        self.branches = torch.nn.ParameterList(torch.randn(FEATURES) for _ in range(2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        found = self.trunk(x) @ self.branches[self.global_rank]
        return {"loss": (found - y[:, 0]).square().mean(), "num_tokens": len(x)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def order_of_messages(rank, place):
    """Return the gathers and the sums of token counts of a rank, in their order."""
    events = []

    def noted(name, function):
        return lambda *args, **kwargs: events.append(name) or function(*args, **kwargs)

    with (
        mock.patch.object(reduction, "start_all_gather", noted("gather", plain)),
        mock.patch.object(engine, "weigh_over_replicas", noted("sum", engine.weigh_over_replicas)),
    ):
        trainer = make_trainer(place, max_epochs=1)
        trainer.fit(Branches(), loader())
    return events


def test_deferred_gathers_precede_sums_on_every_replica(conformance):
    """Both share a communicator, on which NCCL matches the messages of ranks by their order."""
    layout = {"shard": "optimizer", "offload_optimizer": True, "bucket_mb": 1e-5}
    one, other = conformance.ranks(order_of_messages, Place(world_size=2, layout=layout))
    assert {"gather", "sum"} == {*one}
    assert one == other
