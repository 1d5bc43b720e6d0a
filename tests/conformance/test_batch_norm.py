"""``Trainer(sync_batchnorm=True)``: replicas of a stage share batch statistics."""

import warnings

import pytest
import torch
from torch import nn

from tests.conformance.toys import P2, LitNet, Place, loader, make_trainer


class LitNormalized(LitNet):
    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))
        self.net.append(nn.BatchNorm1d(1))


def evaluate(rank, place, sync):
    trainer, module = make_trainer(place, sync_batchnorm=sync), LitNormalized()
    (found,) = trainer.validate(module, loader(), verbose=False)
    groups = [
        child.process_group for child in module.modules() if isinstance(child, nn.SyncBatchNorm)
    ]
    members = [torch.distributed.get_process_group_ranks(group) for group in groups]
    return found["val_loss"], members


@pytest.mark.parametrize(
    ("place", "members"),
    [(Place(world_size=2), [[0, 1]] * 2), (Place(world_size=4, layout=P2), [[0, 1], [2, 3]])],
    ids=["d2", "d2p2"],
)
def test_sync_batchnorm_normalizes_over_replicas(place, members, conformance):
    expected = conformance.ranks(evaluate, place, False)
    found = conformance.ranks(evaluate, place, True)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected])
    assert sorted(group for _, groups in found for group in groups) == sorted(members * 2)


def fit(rank):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make_trainer(Place(world_size=2), max_steps=1).fit(LitNormalized(), loader())
    return [
        str(one.message) for one in told if "average statistics over the batch" in str(one.message)
    ]


def test_unsynchronized_batch_norm_warns_on_rank_zero_only(pool):
    (first, others) = pool.run(fit, world_size=2)
    assert len(first) == 1 and first[0].startswith(
        "net.1, net.8 average statistics over the batch, which here is one replica's part"
    )
    assert others == []


class LitAveraging(LitNet):
    def __init__(self):
        super().__init__()
        view = nn.Unflatten(1, (4, 4))
        self.net.insert(1, nn.Sequential(view, nn.InstanceNorm1d(4), nn.Flatten()))
        averaging = nn.InstanceNorm1d(4, track_running_stats=True)
        self.net.insert(2, nn.Sequential(view, averaging, nn.Flatten()))


def test_running_statistics_of_microbatch_warn():
    with pytest.warns(UserWarning, match=r"^net.2.1 average statistics over the batch"):
        make_trainer(Place(layout={"num_microbatches": 2}), max_epochs=1).fit(
            LitAveraging(), loader()
        )


def test_batch_norm_over_microbatch_warns():
    with pytest.warns(UserWarning, match=r"net.1, net.8 average statistics over the batch"):
        make_trainer(Place(layout={"num_microbatches": 2}), max_epochs=1).fit(
            LitNormalized(), loader()
        )


class LitCounted(LitNet):
    def __init__(self, **options):
        super().__init__()
        self.words = nn.Embedding(4, 4, **options)


def test_gradient_scaled_by_counts_of_microbatch_warns():
    with pytest.warns(UserWarning, match=r"'words' \(scale_grad_by_freq=True\) .* one microbatch"):
        make_trainer(Place(layout={"num_microbatches": 2}), max_epochs=1).fit(
            LitCounted(scale_grad_by_freq=True), loader()
        )


def test_weight_rescaled_by_each_replica_is_refused():
    with pytest.raises(ValueError, match=r"'words' \(max_norm=1.0\) rescales .* one of 2 replicas"):
        make_trainer(Place(world_size=2)).strategy.check(LitCounted(max_norm=1.0))
    make_trainer(Place(layout={"num_microbatches": 2})).strategy.check(LitCounted(max_norm=1.0))
