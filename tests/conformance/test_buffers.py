"""Buffers of replicas: broadcast from rank 0 like in DDP, and saved by rank 0."""

from pathlib import Path
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lightning_ptdp.checkpoint import read_full
from lightning_ptdp.parameters.managed_parameter import UncutParameters
from lightning_ptdp.strategy import model_space
from tests.conformance.toys import (
    FEATURES,
    P2,
    LitNet,
    Place,
    assert_weights,
    loader,
    make_trainer,
    weights,
)

pytestmark = pytest.mark.thorough


class LitStatistics(LitNet):
    """Running statistics in blocks, a buffer of the module and a non-persistent buffer."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))
        self.net.insert(5, nn.BatchNorm1d(16))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.mean = 0.5 * self.mean + batch[0].mean(0)
            self.count += batch_idx
        return super().training_step(batch, batch_idx)


class Buffers(L.Callback):
    """Records the buffers of this rank after each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append({name: value.clone() for name, value in module.named_buffers()})


def fit(rank, place, accumulate=1, folder=""):
    buffers, module = Buffers(), LitStatistics()
    trainer = make_trainer(place, callbacks=[buffers], accumulate_grad_batches=accumulate)
    trainer.fit(module, loader(batch_size=4), loader(batch_size=4))
    if folder:
        trainer.save_checkpoint(folder)
    return {
        "final": weights(trainer),
        "buffers": buffers.seen,
        "val": float(trainer.callback_metrics["val_loss"]),
    }


@pytest.mark.parametrize("accumulate", [1, 2])
def test_buffers_match_ddp(accumulate, conformance):
    pairs = conformance.pairs(fit, "d2", accumulate)
    for ours, reference in pairs:
        for mine, true in zip(ours["buffers"], reference["buffers"], strict=True):
            assert_weights(mine, true)
        assert ours["val"] == pytest.approx(reference["val"])
    # gather_state_dict returns rank 0's buffers on all ranks.
    for ours, _ in pairs:
        assert_weights(ours["final"], pairs[0][1]["final"])


def gathered(rank, place):
    """Return the bytes that this rank sends to gather the model, and those of the model."""
    trainer = make_trainer(place)
    trainer.fit(LitStatistics(), loader(batch_size=4))
    with mock.patch.object(model_space, "gather", wraps=model_space.gather) as gather:
        state = trainer.strategy.gather_state_dict()
    (sent,) = gather.call_args.args
    return sum(data.nbytes for *_, data in sent), sum(value.nbytes for value in state.values())


@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel_size": 2, "num_microbatches": 2}])
def test_one_replica_sends_each_value_of_gathered_model(layout, pool):
    found = pool.run(gathered, world_size=4, args=(Place(world_size=4, layout=layout),))
    sent, sizes = zip(*found, strict=True)
    assert sum(sent) == sizes[0] == sizes[-1]


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, {}),
        (2, {"num_microbatches": 2}),
        (4, P2),
        (4, {**P2, "tensor_parallel_size": 1, "virtual_pipeline_size": 2}),
    ],
    ids=["d2", "d2 m2", "d2 p2", "d2 p2 v2"],
)
def test_checkpoint_has_buffers_of_first_replica(size, layout, broadcast, pool, tmp_path):
    folder = str(tmp_path / "saved.ckpt")
    place = Place(world_size=size, layout={**layout, "broadcast_buffers": broadcast})
    found = pool.run(fit, world_size=size, args=(place, 1, folder))
    saved = torch.load(folder)["state_dict"] if Path(folder).is_file() else read_full(folder)
    stages = size // 2
    first = {
        name: value
        for stage in range(stages)
        for name, value in found[stage * 2]["buffers"][-1].items()
    }
    other = {
        name: value
        for stage in range(stages)
        for name, value in found[stage * 2 + 1]["buffers"][-1].items()
    }
    for name in ("mean", "net.1.running_mean", "net.5.running_var", "net.5.num_batches_tracked"):
        torch.testing.assert_close(saved[name], first[name])
        assert name.endswith("tracked") or not torch.equal(first[name], other[name])
        torch.testing.assert_close(found[size - 1]["final"][name], first[name])


def test_replicas_keep_own_buffers_without_broadcast(conformance):
    with_broadcast, without = (
        conformance.ranks(fit, Place(world_size=2, layout={"broadcast_buffers": flag}))
        for flag in (True, False)
    )
    own = [rank["buffers"][-1]["mean"] for rank in without]
    shared = [rank["buffers"][-1]["mean"] for rank in with_broadcast]
    torch.testing.assert_close(own[0], shared[0])
    assert not torch.allclose(own[1], shared[1])


class LitSharedTable(LitNet):
    def __init__(self):
        super().__init__()
        table = torch.arange(3.0)
        for layer in self.net:
            layer.register_buffer("table", table)


def _save_shared(rank, place, path):
    trainer = make_trainer(place, max_steps=1)
    trainer.fit(LitSharedTable(), loader(batch_size=4))
    trainer.save_checkpoint(path)
    return {*weights(trainer)}


def test_buffer_of_several_stages_is_loaded_under_all_names(conformance, tmp_path):
    path = str(tmp_path / "c")
    names = conformance.ranks(_save_shared, Place(world_size=2, layout=P2), path)[0]
    module = LitSharedTable.load_from_checkpoint(path)
    assert names == {*module.state_dict()}


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x):
        return x * self.factor


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale, self.linear = scale, nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        return self.scale(self.linear(x))


class LitShared(LitNet):
    """Blocks that share a module with a buffer, such as a table of positions."""

    def __init__(self):
        super().__init__()
        scale = Scale()
        blocks = (Scaled(scale) for _ in range(4))
        self.net = nn.Sequential(*blocks, nn.Linear(FEATURES, 1))


def fit_shared(rank, place, epochs, start, folder):
    trainer = make_trainer(place, max_epochs=epochs)
    trainer.fit(LitShared(), loader(), ckpt_path=start)
    trainer.save_checkpoint(folder)
    return weights(trainer)


def test_buffer_that_blocks_share_is_resumed_in_other_layout(conformance, tmp_path):
    paths = [str(tmp_path / name) for name in ("one.ckpt", "cut.ckpt", "last.ckpt")]
    (one,) = conformance.ranks(fit_shared, Place(), 1, None, paths[0])
    cut = conformance.ranks(fit_shared, Place(world_size=2, layout=P2), 2, *paths[:2])[0]
    conformance.ranks(fit_shared, Place(), 3, *paths[1:])
    assert set(cut) == set(one) == set(LitShared().state_dict())


def test_scripted_module_may_be_shared():
    scripted = torch.jit.script(Scale())
    uncut = UncutParameters.of(nn.Sequential(scripted, nn.Linear(1, 1), scripted))
    assert uncut.aliases == {"2.factor": "0.factor"}
