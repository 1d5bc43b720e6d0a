"""The ranks of a replica read the same samples with the same augmentation at every step."""

import os
import random

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ptdp.engine import BatchMismatchError
from lightning_ptdp.engine.rank_agreement import batch_sums
from tests.conformance.toys import P2, LitNet, Place, make_trainer, samples

pytestmark = pytest.mark.thorough


class Augmented(Dataset):
    """Samples with noise from Python's, numpy's and torch's generators."""

    def __init__(self):
        self.pairs = samples(16)

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        x, y = self.pairs[index]
        return x * random.random() + float(np.random.normal()) + torch.randn(()), y


class Seen(L.Callback):
    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, module, batch, *_):
        self.batches.append(batch[0].tolist())


def augment(rank, place):
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    seen = Seen()
    make_trainer(place, callbacks=[seen], max_epochs=1).fit(
        LitNet(), DataLoader(Augmented(), batch_size=4)
    )
    return seen.batches


def test_augmentation_is_equal_within_replica_only(conformance):
    found = conformance.ranks(augment, Place(world_size=4, layout=P2))
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert found[0] != found[1]


def worker_ranks(rank, place):
    L.seed_everything(5, workers=True, verbose=False)
    loader = DataLoader(Augmented(), batch_size=4)
    trainer = make_trainer(place, max_epochs=1)
    trainer.fit(LitNet(), loader)
    return trainer.train_dataloader.worker_init_fn.keywords["rank"]


def test_dataloader_workers_are_seeded_by_replica(conformance):
    assert conformance.ranks(worker_ranks, Place(world_size=4, layout=P2)) == [
        0,
        1,
        0,
        1,
    ]


class Drifting(Dataset):
    """Rank ``rank`` reads other samples from the third batch on."""

    def __init__(self, rank: int) -> None:
        self.pairs, self.rank = samples(16), rank

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        differs = index >= 8 and torch.distributed.get_rank() == self.rank
        return self.pairs[(index + 1) % 16 if differs else index]


def drift(rank, place, drifting, validates):
    seen = Seen()
    trainer = make_trainer(place, callbacks=[seen], max_epochs=1, use_distributed_sampler=False)
    loader = DataLoader(Drifting(drifting), batch_size=4)
    run = trainer.validate if validates else trainer.fit
    with pytest.raises(BatchMismatchError) as error:
        run(LitNet(), loader)
    return str(error.value), len(seen.batches)


@pytest.mark.parametrize("validates", [False, True], ids=["training", "validation"])
@pytest.mark.parametrize("layout", [P2, {**P2, "virtual_pipeline_size": 2}], ids=["p2", "p2v2"])
def test_batch_mismatch_is_detected_at_its_step(layout, validates, conformance):
    found = conformance.ranks(drift, Place(world_size=2, layout=layout), 1, validates)
    assert all("replica 0 read different batches" in text for text, _ in found)
    assert [count for _, count in found] == [0 if validates else 3] * 2


def test_batch_mismatch_is_reported_on_all_replicas(conformance):
    found = conformance.ranks(drift, Place(world_size=4, layout=P2), 3, False)
    assert all("replica 1 read different batches" in text for text, _ in found)


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3),
        torch.randn(2, 3).bfloat16(),
        torch.tensor([True, False]),
        torch.arange(4),
        torch.randn(2).to(torch.complex64),
        torch.tensor(float("nan")),
        torch.empty(0),
        torch.randn(300, 301),
    ],
    ids=lambda value: str(value.dtype),
)
def test_batch_checksum_compares_bits(value):
    def checksum(batch):
        return batch_sums(batch, replica=1, replicas=2, device=torch.device("cpu")).tolist()

    found = checksum({"x": value, "text": ["a"]})
    assert found == checksum({"x": value.clone()})
    assert found[2] == -found[3]
    if value.numel() > 1:
        assert found != checksum({"x": value.flip(0)})
