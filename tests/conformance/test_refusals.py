"""Behaviours 12, 17, 18 and 25: unsupported features of a split model are refused with the reason
and work with a whole model."""

import re
import sys
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision, TorchSyncBatchNorm
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_ptdp import ParallelPlan
from lightning_ptdp.base.requirements import RequirementError
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.strategy.checks.module_content import check_shared_values
from tests.conformance.toys import (
    P2,
    LitNet,
    Losses,
    Place,
    assert_weights,
    loader,
    make_trainer,
    weights,
)
from tests.errors import raises_with

pytestmark = pytest.mark.thorough

PIPELINE = Place(world_size=2, layout={**P2, "start_method": "fork"})
HALVES = ParallelPlan(tensor={"net.2": "column", "net.4": "row"})
TWO_BY_TWO = Place(world_size=4, layout={**P2, "start_method": "fork"})


class OwnCheckpointIO(TorchCheckpointIO):
    """A user's checkpoint plugin."""


class OwnLayerSync(TorchSyncBatchNorm):
    """A user's layer synchronization plugin."""


class LitSharesMemory(LitNet):
    """Ties two layers by their values instead of their parameter."""

    def __init__(self):
        super().__init__()
        self.net[4].weight.data = self.net[2].weight.data


@pytest.mark.parametrize("layout", [P2, {"shard": "optimizer"}, {"offload_optimizer": True}])
def test_parameters_tied_by_their_memory_are_refused(layout):
    place = Place(world_size=2, layout=layout)
    with pytest.raises(ValueError, match=r"'net.4.weight' and 'net.2.weight' .* same memory"):
        make_trainer(place).strategy.check(LitSharesMemory())
    make_trainer(Place(world_size=2)).strategy.check(LitSharesMemory())


class LitFixedGraph(LitNet):
    """Has a sparse parameter and parameters without memory, which share no values."""

    def __init__(self):
        super().__init__()
        self.adjacency = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
        self.released = nn.ParameterList(torch.ones(2) for _ in range(2))
        for parameter in self.released:
            parameter.untyped_storage().resize_(0)


def test_parameters_without_addresses_are_not_taken_for_tied():
    config = PTDPConfig(offload_optimizer=True)
    check_shared_values(LitFixedGraph(), config, config.layout(1))


class LitManual(LitNet):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class LitTunable(LitNet):
    lr, batch_size = 0.1, 4

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"callbacks": [StochasticWeightAveraging(1e-2)]},
            ["StochasticWeightAveraging", "t1 p2 d2", "only data parallelism"],
        ),
        (
            {"callbacks": [EMAWeightAveraging()]},
            ["EMAWeightAveraging", "t1 p2 d2", "only data parallelism"],
        ),
        (
            {"callbacks": [LearningRateFinder()]},
            ["LearningRateFinder", "t1 p2 d2", "only data parallelism"],
        ),
        (
            {"callbacks": [BatchSizeFinder()]},
            ["BatchSizeFinder", "t1 p2 d2", "only data parallelism"],
        ),
        ({"callbacks": [ModelPruning("l1_unstructured")]}, ["ModelPruning", "before fit"]),
        ({"sync_batchnorm": True}, ["sync_batchnorm=True does not work on the CPU"]),
        ({"plugins": [OwnLayerSync()]}, ["OwnLayerSync", "sync_batchnorm=True"]),
        (
            {"plugins": [OwnCheckpointIO()], "enable_checkpointing": True},
            ["OwnCheckpointIO", "on_save_checkpoint"],
        ),
        (
            {"plugins": [AsyncCheckpointIO()], "enable_checkpointing": True},
            ["AsyncCheckpointIO", "async_save=True"],
        ),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_callback_or_plugin_is_refused_for_split_model(settings, words):
    with raises_with(words, MisconfigurationException):
        make_trainer(TWO_BY_TWO, **settings).fit(LitTunable(), loader())


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("callback", [LearningRateFinder(), ModelPruning("l1_unstructured")])
def test_layout_that_splits_sequences_is_named_for_callback(callback):
    place = Place(world_size=2, layout={"context_parallel_size": 2, "start_method": "fork"})
    with pytest.raises(MisconfigurationException, match=r"c2 .*divides it, or its sequences"):
        make_trainer(place, callbacks=[callback]).fit(LitTunable(), loader())


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("place", "settings"),
    [
        (Place(world_size=2, layout={"shard": "optimizer", "start_method": "fork"}), {}),
        (Place(), {"precision": "bf16-true"}),
    ],
)
def test_pruning_of_sharded_or_master_weights_is_refused(place, settings):
    with pytest.raises(MisconfigurationException, match=r"ModelPruning.*shard='none'"):
        make_trainer(place, callbacks=[ModelPruning("l1_unstructured")], **settings).fit(
            LitTunable(), loader()
        )


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("layout", "settings", "words"),
    [
        ({"pipeline_parallel_size": 2}, {}, "pipeline_parallel_size=1"),
        ({"shard": "optimizer"}, {}, "shard='none'"),
        ({}, {"precision": "bf16-true"}, "master_weights=False"),
    ],
)
def test_finetuning_of_partial_or_master_weights_is_refused(layout, settings, words):
    place = Place(world_size=2, layout={**layout, "start_method": "fork"})
    with pytest.raises(MisconfigurationException, match=f"BackboneFinetuning.*{words}"):
        make_trainer(place, callbacks=[BackboneFinetuning()], **settings).fit(
            LitTunable(), loader()
        )


@pytest.mark.usefixtures("nothing_starts")
def test_float16_without_master_weights_is_refused():
    with pytest.raises(MisconfigurationException, match="'16-true' with master_weights=False"):
        make_trainer(
            Place(world_size=2, layout={"master_weights": False}), precision="16-true"
        ).fit(LitTunable(), loader())


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
def test_scaled_loss_with_offloaded_optimizer_is_refused(precision):
    place = Place(world_size=2, layout={"offload_optimizer": True})
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    options = {"precision": precision} if precision == "16-true" else {"plugins": [plugin]}
    with pytest.raises(MisconfigurationException, match=f"'{precision}' scales the loss"):
        make_trainer(place, **options).fit(LitTunable(), loader())


@pytest.mark.usefixtures("nothing_starts")
def test_tuner_and_manual_optimization_are_refused_in_pipeline():
    with pytest.raises(MisconfigurationException, match="LearningRateFinder"):
        Tuner(make_trainer(PIPELINE)).lr_find(LitTunable(), loader())
    with pytest.raises(MisconfigurationException, match="manual optimization"):
        make_trainer(PIPELINE).fit(LitManual(), loader())


@pytest.mark.usefixtures("nothing_starts")
def test_tuner_is_refused_where_its_result_would_be_lost():
    place = Place(world_size=2, layout={"start_method": "fork"})
    with pytest.raises(
        MisconfigurationException, match="Tuner returns its result in the processes"
    ):
        Tuner(make_trainer(place)).lr_find(LitTunable(), loader())


class LitBackward(LitNet):
    calls = 0

    def backward(self, loss):
        self.calls += 1
        loss.backward()


@pytest.mark.parametrize(
    ("module", "layout", "settings", "words"),
    [
        (LitManual, {"num_microbatches": 4}, {}, ["manual optimization", "num_microbatches=4"]),
        (LitManual, {"micro_batch_size": 4}, {}, ["manual optimization", "micro_batch_size=4"]),
        (LitManual, {"check_finite": "raise"}, {}, ["manual optimization", "check_finite='raise'"]),
        (LitManual, {"offload_optimizer": True}, {}, ["manual optimization", "offload_optimizer"]),
        (
            LitManual,
            {},
            {"precision": "bf16-true"},
            ["manual optimization", "master_weights=False"],
        ),
        (
            LitBackward,
            {"num_microbatches": 4},
            {},
            ["LightningModule.backward", "on_after_backward"],
        ),
    ],
)
def test_user_backward_is_refused_with_unsupported_options(module, layout, settings, words):
    with raises_with(words, MisconfigurationException):
        make_trainer(Place(layout=layout), **settings).fit(module(), loader())


def test_overridden_backward_runs_without_microbatches():
    module = LitBackward()
    make_trainer(Place(), max_epochs=1).fit(module, loader())
    assert module.calls == len(loader())


class LitIterates(LitNet):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class LitIteratesValidation(LitNet):
    def validation_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        self.log("val_loss", self.loss(batch), batch_size=8)


@pytest.mark.usefixtures("nothing_starts")
def test_dataloader_iter_step_is_refused_if_batches_are_split():
    with pytest.raises(
        MisconfigurationException, match=r"training_step\(dataloader_iter\).*\(batch, batch_idx\)"
    ):
        make_trainer(Place(layout={"num_microbatches": 2})).fit(LitIterates(), loader())
    with pytest.raises(MisconfigurationException, match=r"validation_step\(dataloader_iter\)"):
        make_trainer(PIPELINE).fit(LitIteratesValidation(), loader(), loader())
    make_trainer(Place(), max_epochs=1).fit(LitIterates(), loader())
    make_trainer(Place(layout={"num_microbatches": 2}), max_epochs=1).fit(
        LitIteratesValidation(), loader(), loader()
    )


class LitEvaluatedOnly(LitManual):
    def backward(self, loss, *args, **kwargs):
        raise AssertionError("nothing trains")


def evaluate(rank, place):
    trainer = make_trainer(place)
    found = trainer.validate(LitEvaluatedOnly(), loader(), verbose=False)
    return found[0]["val_loss"]


@pytest.mark.parametrize("name", ["one m2", "d2", "p2"])
def test_manual_optimization_module_is_evaluated_in_any_layout(name, conformance):
    conformance.check(evaluate, name)


class LitOutside(LitNet):
    """Optimizes a parameter that is not part of the module."""

    def configure_optimizers(self):
        return torch.optim.Adam([*self.parameters(), torch.nn.Parameter(torch.ones(3))], lr=1e-2)


def step_on_others(rank, place):
    try:
        make_trainer(place, max_epochs=1).fit(LitOutside(), loader())
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "place",
    [
        Place(world_size=2),
        Place(world_size=2, layout=P2),
        Place(layout={"num_microbatches": 2}),
    ],
    ids=["d2", "p2", "m2"],
)
def test_optimizer_of_foreign_parameters_is_refused(place, conformance):
    found = conformance.ranks(step_on_others, place)
    assert any("Create the optimizer in configure_optimizers" in text for text in found)


class LitMadeBefore(LitNet):
    """Has its optimizer before fit, as LightningCLI makes it."""

    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.Adagrad(self.parameters(), lr=1e-2)  # with states
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    def configure_optimizers(self):
        return [self.optimizer], [self.scheduler]


def train_made_before(rank, place):
    trainer = make_trainer(place)
    trainer.fit(LitMadeBefore(), loader())
    return weights(trainer)


@pytest.mark.parametrize(
    "place",
    [
        "one",
        "one m2",
        "d2",
        "p2",
        Place(world_size=2, layout={"tensor_parallel_size": 2, "plan": HALVES}),
    ],
    ids=str,
)
def test_optimizer_created_before_fit_trains_whole_model(place, conformance):
    conformance.check(train_made_before, place)


class LitLate(LitNet):
    """Built in ``configure_model`` with a given number of layers, a parameter in ``__init__``."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.net, self.depth, self.scale = None, depth, torch.nn.Parameter(torch.ones(1))

    def configure_model(self):
        if self.net is None:
            assert not self.trainer_attached(), "the trainer's module was built before launch"
            self.net = torch.nn.Sequential(
                *(torch.nn.Linear(8, 8) for _ in range(self.depth)), torch.nn.Linear(8, 1)
            )

    def trainer_attached(self):
        return self._trainer is not None


class LitLoads(LitLate):
    def configure_model(self):
        if self.net is None:
            assert torch.get_default_device().type == "cpu", "cannot be built on the meta device"
            super().configure_model()


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("module", [LitLate, LitLoads])
def test_configure_model_is_checked_without_meta_device(module):
    layout = {**PIPELINE.layout, "meta_init": False, "virtual_pipeline_size": 2}
    small = module(2)
    state = torch.random.get_rng_state()
    with pytest.raises(ValueError, match="num_layers=3"):
        make_trainer(Place(world_size=2, layout=layout)).fit(small, loader())
    assert torch.equal(state, torch.random.get_rng_state())
    with pytest.raises(AssertionError, match="a process was started"):
        make_trainer(Place(world_size=2, layout=layout)).fit(module(5), loader())


def prune(rank, place):
    callback = ModelPruning("l1_unstructured", amount=0.3)
    module = LitTunable()
    make_trainer(place, callbacks=[callback], max_epochs=3).fit(module, loader())
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("name", ["one m2", "d2"])
def test_pruning_of_whole_model_matches_lightning(name, conformance):
    for _, expected in conformance.check(prune, name):
        assert any(bool((value == 0).any()) for value in expected.values())


def find_rate(rank, place):
    module = LitTunable()
    found = Tuner(make_trainer(place)).lr_find(module, loader(), num_training=20, min_lr=1e-4)
    return found.suggestion(), found.results["loss"]


def test_learning_rate_finder_matches_lightning(conformance, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    conformance.check(find_rate, "one")


def profile(rank, place, path):
    profiler = SimpleProfiler(dirpath=path, filename=f"profile{rank}{place.folder}")
    trainer = make_trainer(place, profiler=profiler)
    trainer.fit(LitNet(), loader())
    return sorted(profiler.recorded_durations), weights(trainer)


def test_simple_profiler_records_training_step(conformance, tmp_path):
    for (actions, found), (_, expected) in conformance.pairs(profile, "p2", str(tmp_path)):
        assert any("training_step" in action for action in actions)
        assert_weights(found, expected)


class DictConfig:
    """A stand-in for OmegaConf's DictConfig, which is not a dict."""

    __module__ = "omegaconf.dictconfig"


class LitKeeps(LitNet):
    """Saves its arguments as hyperparameters."""

    def __init__(self, given: Any = None, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()


class KeepsData(L.LightningDataModule):
    def __init__(self, given: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return loader()


def test_object_hyperparameters_are_omitted_with_warning(tmp_path):
    saves = {
        "enable_checkpointing": True,
        "default_root_dir": tmp_path,
        "max_epochs": 1,
    }
    place = Place(layout={"checkpoint_format": "folder"})
    trainer = make_trainer(place, **saves)
    given = torch.nn.Linear(2, 1)
    with pytest.warns(UserWarning, match="are objects") as told:
        trainer.fit(LitKeeps(given, 4), datamodule=KeepsData(DictConfig()))
    texts = [str(one.message) for one in told if "are objects" in str(one.message)]
    assert len(texts) == 2
    assert (
        "hyperparameters of LitKeeps" in texts[0]
        and "'given' (a torch.nn.modules.linear.Linear)" in texts[0]
    )
    assert (
        "hyperparameters of KeepsData" in texts[1]
        and "'given' (a omegaconf.dictconfig.DictConfig)" in texts[1]
    )
    path = trainer.checkpoint_callback.best_model_path
    with pytest.warns(
        UserWarning, match=r"without these hyper_parameters, which are objects: given \(a torch"
    ):
        found = LitKeeps.load_from_checkpoint(path)
    assert dict(found.hparams) == {"width": 4, "given": None}
    assert LitKeeps.load_from_checkpoint(path, given=3).hparams.given == 3
    trusted = LitKeeps.load_from_checkpoint(path, weights_only=False)
    assert torch.equal(trusted.hparams.given.weight, given.weight)
    make_trainer(place, **{**saves, "max_epochs": 2}).fit(
        LitKeeps(given, 4), loader(), ckpt_path=path
    )


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("place", "url", "words"),
    [
        (PIPELINE, "memory://bucket", "is in the memory of one process, but 2 ranks save there"),
        (PIPELINE, "s3://key:hidden@bucket/x", r"s3://\*\*\*@bucket/x contains credentials"),
        (
            Place(layout={"snapshot_every_n_steps": 1}),
            "memory://bucket",
            "snapshot_every_n_steps needs a mounted folder",
        ),
    ],
)
def test_unusable_address_for_checkpoints_is_refused(place, url, words):
    with pytest.raises(MisconfigurationException, match=words):
        make_trainer(
            place, enable_checkpointing=True, callbacks=[ModelCheckpoint(dirpath=url)]
        ).fit(LitNet(), loader())


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "s3://bucket/last.ckpt",
            "s3://bucket/last.ckpt needs s3fs, which is not installed. Run: pip install "
            "'lightning-ptdp[s3]'",
        ),
        (
            "gs://bucket/last.ckpt",
            "needs gcsfs, which is not installed. Run: pip install 'lightning-ptdp[gs]'",
        ),
        ("tape://7/last.ckpt", "fsspec does not support URLs with the protocol tape://"),
    ],
)
def test_checkpoint_url_without_library_is_refused(url, words, monkeypatch):
    for library, protocol in (("s3fs", "s3"), ("gcsfs", "gs")):
        monkeypatch.setitem(sys.modules, library, None)
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
    for run in ("fit", "validate"):
        with pytest.raises(RequirementError, match=re.escape(words)):
            getattr(make_trainer(TWO_BY_TWO), run)(LitNet(), loader(), ckpt_path=url)
    with pytest.raises(RequirementError, match=re.escape(words)):
        LitNet.load_from_checkpoint(url)


class Counted(torch.nn.Linear):
    """Adds an int to its ``state_dict``."""

    extra: Any = 7

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.usefixtures("nothing_starts")
def test_non_tensor_extra_state_is_refused(tmp_path):
    module = LitNet()
    module.net[2] = Counted(16, 16)
    with pytest.raises(
        MisconfigurationException,
        match=r"the state_dict entry 'net\.2\._extra_state' is a int, but only tensors are saved",
    ):
        make_trainer(PIPELINE, enable_checkpointing=True, default_root_dir=tmp_path).fit(
            module, loader()
        )


class LitStores(LitNet):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make(self.parameters())


def fit_and_save(rank, place, path, make, saves):
    steps = Losses()
    trainer = make_trainer(
        place, enable_checkpointing=saves, default_root_dir=path, callbacks=[steps], max_epochs=1
    )
    try:
        trainer.fit(LitStores(make), loader())
    except ValueError as error:
        assert not steps.values, "the optimizer was not refused before the first step"
        return str(error)
    return f"{len(steps.values)} steps"


class Listing(torch.optim.SGD):
    """Keeps a list for each parameter."""

    def step(self, closure=None):
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("norms", []).append(parameter.norm())
        return loss


def test_unsavable_optimizer_is_refused_before_first_step(pool, tmp_path):
    (message,) = pool.run(
        fit_and_save,
        world_size=1,
        args=(
            Place(layout={"checkpoint_format": "folder"}),
            str(tmp_path),
            Listing,
            True,
        ),
    )
    assert "Listing cannot be checkpointed: its state 'norms' of 'weight' is a list" in message
    assert "enable_checkpointing=False" in message
    # Lightning's single file supports any optimizer.
    for make, saves in (
        (Listing, False),
        (Listing, True),
        (torch.optim.Adam, True),
    ):
        assert pool.run(fit_and_save, world_size=1, args=(Place(), str(tmp_path), make, saves)) == [
            "4 steps"
        ]


def fit_without_validation(rank):
    module = LitNet()
    module.validation_step = None
    make_trainer(Place(world_size=2, layout=P2), max_epochs=1).fit(module, loader())


def test_validation_step_set_to_none_is_accepted(pool):
    pool.run(fit_without_validation, world_size=2)
