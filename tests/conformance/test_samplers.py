"""Behaviours 13 and 14: distribution of samples over ranks."""

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.conformance.toys import (
    P2,
    LitNet,
    Losses,
    Place,
    loader,
    make_trainer,
    samples,
    weights,
)

pytestmark = pytest.mark.thorough


class SeenSamples(L.Callback):
    """Records the targets of every training batch, which identify the samples, per epoch."""

    def __init__(self):
        self.epochs = []

    def setup(self, trainer, *_, **__):
        # every process has another random state: the order must not depend on it
        torch.rand(trainer.global_rank + 1)

    def on_train_epoch_start(self, *_):
        self.epochs.append([])

    def on_train_batch_start(self, trainer, module, batch, *_):
        self.epochs[-1].append(batch[1].flatten().tolist())


def read(rank, place, shuffle):
    seen = SeenSamples()
    trainer = make_trainer(place, callbacks=[seen])
    trainer.fit(LitNet(), loader(32, batch_size=4, shuffle=shuffle))
    return seen.epochs


def read_twice(rank, place):
    seen = SeenSamples()
    for _ in range(2):
        make_trainer(place, callbacks=[seen], max_epochs=1).fit(
            LitNet(), loader(32, batch_size=4, shuffle=True)
        )
    return seen.epochs


@pytest.mark.parametrize("name", ["one", "one m2", "d2"])
def test_second_fit_shuffles_like_lightning(name, conformance):
    for found, expected in conformance.pairs(read_twice, name):
        assert found == expected


LAYOUTS = {
    "d2": Place(world_size=2),
    "p2": Place(world_size=2, layout=P2),
    "d2p2": Place(world_size=4, layout=P2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_replicas_split_samples_and_their_ranks_agree(name, conformance):
    place = LAYOUTS[name]
    layout = place.strategy.config.layout(place.world_size)
    ranks = conformance.ranks(read, place, True)
    for replica in layout.groups("model"):
        assert all(ranks[rank] == ranks[replica[0]] for rank in replica), (
            "ranks of one replica read different orders"
        )
    everything = sorted(samples(32).tensors[1].flatten().tolist())
    for epoch in range(2):
        firsts = [ranks[replica[0]][epoch] for replica in layout.groups("model")]
        read_by_all = sorted(value for batches in firsts for batch in batches for value in batch)
        assert read_by_all == everything, "a sample was read twice or not at all"
    assert ranks[0][0] != ranks[0][1], "the second epoch has the order of the first"


def test_pipeline_reads_samples_in_data_parallel_order(conformance):
    pipeline = conformance.ranks(read, LAYOUTS["p2"], True)[0]
    replicas = conformance.ranks(read, LAYOUTS["d2"], True)
    for epoch, found in enumerate(pipeline):
        first, second = ([value for batch in ranks[epoch] for value in batch] for ranks in replicas)
        assert [value for batch in found for value in batch] == [
            value for pair in zip(first, second, strict=True) for value in pair
        ]


class Stream(IterableDataset):
    """A stream of samples without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        x, y = samples(self.count).tensors
        return iter(zip(x, y, strict=True))


LOADERS = {
    "uneven last batch": lambda: loader(21, batch_size=4),
    "last batch of one": lambda: loader(17, batch_size=4),
    "drop_last": lambda: loader(21, batch_size=4, drop_last=True),
    "stream": lambda: DataLoader(Stream(18), batch_size=4),
}


def train(rank, place, data):
    losses = Losses()
    trainer = make_trainer(place, callbacks=[losses])
    trainer.fit(LitNet(), LOADERS[data](), LOADERS[data]())
    return (
        losses.values,
        weights(trainer),
        trainer.global_step,
        float(trainer.callback_metrics["val_loss"]),
    )


@pytest.mark.parametrize("data", LOADERS)
def test_uneven_batches_and_streams_match_lightning(data, conformance):
    conformance.check(train, "p2", data)
