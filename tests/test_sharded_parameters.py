"""Sharded parameters: each rank keeps only its part of them between their uses."""

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, get_args
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.data_parallel.bucket import Bucket
from lightning_ptdp.data_parallel.sharded_parameters import ShardedParameters
from lightning_ptdp.world.layout import Sharding
from tests import sharded_places
from tests.letters import M, P, R, V, Z
from tests.parity import assert_weights_near, make_trainer
from tests.tiny_gpt import Run

pytestmark = pytest.mark.thorough

SHARDED = {Z: "parameters"}
BY = "reshard_after"
PLACES = sharded_places.PLACES | {
    "d2p2v2 by block": (4, {P: 2, V: 2, M: 4, BY: "block"}),
    "d2p2v3": (4, {P: 2, V: 3, M: 4}),
    "d2p2v3 by step": (4, {P: 2, V: 3, M: 4, BY: "step"}),
    "d2 m2 by chunk": (2, {M: 2, BY: "chunk"}),
    "d2 by step": (2, {BY: "step"}),
    "d2 recomputed": (2, {M: 2, R: "full"}),
    "d2 recomputed in part": (2, {R: "selective"}),
    "d2 compiled": (2, {"compile": "blocks", "compile_options": {"backend": "aot_eager"}}),
    "d2 compiled, recomputed": (
        2,
        {R: "full", M: 2, "compile": "blocks", "compile_options": {"backend": "aot_eager"}},
    ),
}


# Gradients are accumulated in each kind of place: with and without microbatches, chunks,
# recomputation and a second level.
ACCUMULATING = (
    *("d2", "d2 m3", "d4 in two levels", "d2p2v2", "d2p2v2 by block", "d2p2v3 by step"),
    *("d2 by step", "d2p2v2 zb_v", "d2 recomputed"),
)


@dataclass(frozen=True, kw_only=True)
class Deep(Run):
    """A training of six blocks.

    An element of a bias has almost no gradient, so that Adam enlarges its rounding: in one process,
    two microbatches instead of one already change the bias by 7e-6.
    """

    layers: int = 6
    weight_tolerance: ClassVar[float] = 2e-5


@pytest.mark.parametrize(
    ("name", "accumulate"),
    [*((name, 1) for name in PLACES), *((name, 2) for name in ACCUMULATING)],
)
def test_training_equals_single_process(name, accumulate, parity):
    world_size, layout = PLACES[name]
    run = Deep(accumulate=accumulate, steps=2 * accumulate, global_batch=16)
    parity.check(run, (world_size, {**layout, **SHARDED}))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_one_microbatch_equals_sharded_optimizer_bitwise(precision, parity):
    run = Run(steps=2, precision=precision, clip=None)  # units sum the norm in another order
    optimizer, parameters = (
        parity.ranks(run.on((4, {**SHARDED, Z: shard}))) for shard in ("optimizer", "parameters")
    )
    for one, other in zip(optimizer, parameters, strict=True):
        assert one["losses"] == other["losses"]
        assert_weights_near(other["final"], one["final"], tolerance=0)


# ---- Memory --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measured(Run):
    """A training that measures what a rank holds."""

    layers: int = 8
    hidden: int = 64
    steps: int = 2

    def make_callbacks(self):
        return [Measurement()]

    def results(self, trainer, module):
        (measurement,) = (c for c in trainer.callbacks if isinstance(c, Measurement))
        return {name: getattr(measurement, name) for name in ("held", "whole", "block", "unsummed")}


class Measurement(L.Callback):
    """Bytes per parameter between the steps, and the gathered elements during them.

    Attributes:
        held: Bytes per parameter of the parameters, gradients and states.
        whole: Largest number of gathered elements beyond those outside of the blocks.
        block: Number of elements of a block.
        unsummed: Most units whose gradients wait for their sum at once.
    """

    def setup(self, trainer, module, stage):
        self.held, self.whole, self.unsummed = 0.0, 0, 0

        need = ShardedParameters.need

        def watched(shards, unit):
            need(shards, unit)
            blocks = [unit.flats for unit in shards._units if unit.block is not None]
            self.block = sum(flat.size for flat in blocks[0])
            flats = [flat for flats in blocks for flat in flats if flat.full is not None]
            self.whole = max(self.whole, sum(flat.size for flat in flats))

        start_sum = Bucket.start_sum

        def counted(bucket):
            buckets = trainer.strategy.engine.gradients._store.buckets()
            waiting = sum(bucket.unsummed is not None for bucket in buckets)
            self.unsummed = max(self.unsummed, waiting)
            return start_sum(bucket)

        self._patches = [
            mock.patch.object(ShardedParameters, "need", watched),
            mock.patch.object(Bucket, "start_sum", counted),
        ]
        for patch in self._patches:
            patch.start()

    def teardown(self, trainer, module, stage):
        for patch in self._patches:
            patch.stop()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        parallel, (optimizer,) = trainer.strategy.parallel, trainer.optimizers
        tensors = [m.held for m in parallel.parameters.values() if m.held is not None]
        tensors += trainer.strategy.engine.gradients.local()
        states = [*optimizer.state.values()]
        tensors += [value for state in states for value in state.values() if value.dim()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        count = sum(parameter.numel() for parameter in parallel.parameters)
        self.held = max(self.held, sum(storages.values()) / count)


@pytest.mark.parametrize("options", [{}, {M: 2}, {R: "full"}, {M: 4, P: 2, BY: "block"}], ids=str)
def test_rank_holds_share_and_gathers_two_blocks(options, parity):
    run = Measured().on((4, {**options, **SHARDED}))
    for found in parity.ranks(run):
        assert found["held"] == pytest.approx(16 / (4 // options.get(P, 1)), rel=0.02)
        assert found["block"] < found["whole"] <= 2 * found["block"]
        assert found["unsummed"] <= 2  # a block, and the parameters outside of the blocks


def test_meta_model_is_never_whole(parity):
    """Values are drawn block by block: no more than two are whole at a time."""
    for most, total in parity.pool.run(_largest_during_setup, world_size=4):
        assert most < 0.55 * total


def _largest_during_setup(rank):
    """Return the most bytes of living parameters during the set-up, and those of the model."""
    seen = []
    alive = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            for tensor in tree_iter(made):
                if isinstance(tensor, Tensor) and not tensor.is_meta:
                    storage = tensor.untyped_storage()
                    if storage._cdata not in alive:
                        alive[storage._cdata] = storage.nbytes()
                        weakref.finalize(tensor, alive.pop, storage._cdata, None)
            seen.append(sum(alive.values()))
            return made

    run = Measured(steps=1, layers=12).on((4, SHARDED))
    trainer, module = run.make_trainer(), run.make_module()
    setup = trainer.strategy._parallelize

    def watched():
        with Watch():
            setup()

    trainer.strategy._parallelize = watched
    trainer.fit(module, *run.make_loaders(trainer))
    return max(seen), 4 * sum(p.numel() for p in trainer.strategy.parallel.parameters)


# ---- What people write around a model ------------------------------------------------------------


class Plain(L.LightningModule):
    """A module whose step draws, penalizes its parameters, and may normalize a weight."""

    def __init__(self, **options):
        super().__init__()
        self.options = options
        torch.manual_seed(3)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
        self.head = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        if self.options.get("normalizes"):
            with torch.no_grad():
                self.head.weight.copy_(F.normalize(self.head.weight))
                self.head.bias.data = 0.9 * self.head.bias.data
        y = self.head(self.layers(x + 0.01 * torch.randn_like(x)))
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        self.log("norm", self.layers[0][0].weight.norm())
        return (y - x.sum(1, keepdim=True)).square().mean() + 1e-2 * penalty

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.options.get("reads"):
            self.options["reads"](self)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _fit_plain(rank, shard, options):
    torch.manual_seed(5)
    strategy = PTDPStrategy(shard=shard)
    trainer = make_trainer(strategy, 2, max_steps=4)
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)
    error = ""
    try:
        trainer.fit(Plain(**options), loader)
    except ValueError as refusal:
        error = str(refusal)
    return strategy.gather_state_dict() if not error else {}, error


@pytest.mark.parametrize("options", [{}, {"normalizes": True}], ids=str)
def test_step_may_read_and_write_parameters(options, pool):
    wanted, *others = (
        pool.run(_fit_plain, world_size=2, args=(shard, options))[0] for shard in get_args(Sharding)
    )
    for found in others:
        assert not wanted[1] and not found[1]
        for name, value in wanted[0].items():
            assert torch.equal(found[0][name], value), name


def _norm(module):
    module.head.weight.norm()


def _clamp(module):
    module.head.weight.data.clamp_(-1, 1)


def _state(module):
    float(module.state_dict()["head.weight"][0, 0])


@pytest.mark.parametrize("reads", [_norm, _clamp, _state])
def test_hook_between_steps_is_named_with_parameter(reads, pool):
    for _, error in pool.run(_fit_plain, world_size=2, args=("parameters", {"reads": reads})):
        assert error.startswith("on_train_batch_end reads the values of 'head.weight' (")
        assert "gather_state_dict" in error and "shard='gradients'" in error


def test_unsupported_options_are_refused():
    with pytest.raises(ValueError, match="recompute='offload' keeps what a block has saved"):
        PTDPStrategy(shard="parameters", recompute="offload")
    with pytest.raises(ValueError, match="reshard_after='step' has no effect with shard='none'"):
        PTDPStrategy(reshard_after="step")


# ---- Sums of gradients ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Summed(Run):
    """A training that counts the sums of the blocks' gradients in a step."""

    steps: int = 1

    def make_callbacks(self):
        return [SumCounter()]

    def results(self, trainer, module):
        (counter,) = (c for c in trainer.callbacks if isinstance(c, SumCounter))
        return {"sums": counter.sums}


class SumCounter(L.Callback):
    """Counts the sums of each bucket.

    Attributes:
        sums: Largest number of sums of a bucket.
    """

    def on_train_start(self, trainer, module):
        counts = Counter[int]()
        start_sum = Bucket.start_sum

        def counted(bucket):
            counts[id(bucket)] += 1
            self.sums = max(counts.values())
            return start_sum(bucket)

        self.patch = mock.patch.object(Bucket, "start_sum", counted)
        self.patch.start()

    def on_train_end(self, trainer, module):
        self.patch.stop()


@pytest.mark.parametrize(
    ("layout", "sums"),
    [
        ({P: 2, V: 2, M: 4}, 2),  # p microbatches follow each other
        ({P: 2, V: 2, M: 4, BY: "block"}, 4),
        ({P: 2, M: 4}, 4),  # a single chunk would be whole for the step
    ],
    ids=str,
)
def test_chunk_sums_gradients_once_per_run_of_microbatches(layout, sums, parity):
    for found in parity.ranks(Summed(layers=4).on((4, {**layout, **SHARDED}))):
        assert found["sums"] == sums
