"""Tests of Lightning's single file: when it is written, its readers, and resuming from it."""

import enum
import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ptdp.checkpoint import CheckpointError, is_checkpoint, write_file
from tests.conformance.toys import P2, LitNet, Place, assert_weights, loader, make_trainer, weights

pytestmark = pytest.mark.thorough

ONE, D2, SHARDED = (
    Place(),
    Place(world_size=2),
    Place(world_size=2, layout={"shard": "optimizer"}),
)
PIPELINE, MICROBATCHES = Place(world_size=2, layout=P2), Place(layout={"num_microbatches": 2})


class LitGroups(LitNet):
    """Module whose parameter groups differ in order from the model."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self):
        biases = [p for p in self.parameters() if p.dim() == 1]
        groups = [
            {"params": biases, "weight_decay": 0.0},
            {"params": [p for p in self.parameters() if p.dim() > 1]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class InOrder(torch.utils.data.DistributedSampler[Any]):
    """Sampler over the data-parallel replicas, without shuffling."""

    def __init__(self, trainer: Any) -> None:
        given = getattr(
            trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0}
        )
        super().__init__(list(range(32)), **given, shuffle=False)


def train(rank, place, folder, epochs, resume=None, strategy=None):
    L.seed_everything(1, verbose=False)
    saver = ModelCheckpoint(folder, filename=f"{{epoch}}-{place.world_size}", save_top_k=-1)
    place = Place(world_size=place.world_size, layout=place.layout, reference=strategy)
    trainer = make_trainer(place, max_epochs=epochs, callbacks=[saver], enable_checkpointing=True)
    trainer.strategy.setup_environment  # noqa: B018 - ranks are known before the loader is made
    sampler = InOrder(trainer) if place.world_size > 1 else None
    replicas = sampler.num_replicas if sampler is not None else 1
    trainer.fit(LitGroups(), loader(batch_size=8 // replicas, sampler=sampler), ckpt_path=resume)
    return weights(trainer), saver.best_model_path


@pytest.fixture(scope="module")
def written(pool, tmp_path_factory):
    """Return single-process weights after two epochs, and files of three places after one."""
    folder = tmp_path_factory.mktemp("written")
    expected, _ = pool.run(train, world_size=1, args=(ONE, str(folder / "whole"), 2))[0]
    found = {}
    for name, place in (("one", ONE), ("d2", D2), ("m2", MICROBATCHES)):
        _, found[name] = pool.run(
            train, world_size=place.world_size, args=(place, str(folder / name), 1)
        )[0]
    return expected, found


@pytest.mark.parametrize("name", ["one", "d2", "m2"])
def test_file_has_lightning_format(written, name):
    path = written[1][name]
    assert Path(path).is_file() and sorted(Path(path).parent.iterdir()) == [Path(path)]
    content = torch.load(path, weights_only=True)
    parts = "state_dict optimizer_states lr_schedulers loops callbacks epoch"
    assert content.keys() >= set(parts.split())
    module = LitGroups.load_from_checkpoint(path)
    assert_weights(module.state_dict(), content["state_dict"], tolerance=0)
    torch.optim.AdamW(
        [{"params": [p for p in module.parameters() if p.dim() == d]} for d in (1, 2)]
    ).load_state_dict(content["optimizer_states"][0])


@pytest.mark.parametrize(
    "place", [ONE, D2, SHARDED, PIPELINE, MICROBATCHES], ids=["one", "d2", "sharded", "p2", "m2"]
)
@pytest.mark.parametrize("name", ["one", "d2"])
def test_single_file_resumes_in_any_layout(written, name, place, pool, tmp_path):
    expected, paths = written
    found, saved = pool.run(
        train, world_size=place.world_size, args=(place, str(tmp_path), 2, paths[name])
    )[0]
    assert_weights(found, expected)
    assert Path(saved).is_dir() == (place in (SHARDED, PIPELINE))


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_lightning_strategies_resume_from_file(written, strategy, pool, tmp_path):
    expected, paths = written
    world_size = 2 if strategy == "ddp" else 1
    args = (Place(world_size=world_size), str(tmp_path), 2, paths["d2"], strategy)
    assert_weights(pool.run(train, world_size=world_size, args=args)[0][0], expected)


def test_lightning_file_resumes_with_sharded_optimizer(written, pool, tmp_path):
    expected, _ = written
    _, path = pool.run(train, world_size=1, args=(ONE, str(tmp_path / "own"), 1, None, "auto"))[0]
    found, _ = pool.run(train, world_size=2, args=(SHARDED, str(tmp_path / "ours"), 2, path))[0]
    assert_weights(found, expected)


@pytest.mark.parametrize("format", ["file", "folder"])
def test_float64_weights_are_not_rounded(format, tmp_path):
    place = Place(layout={"checkpoint_format": format})
    options: dict[str, Any] = {"max_epochs": 1, "precision": "64-true"}
    before, after = make_trainer(place, **options), make_trainer(place, **options)
    before.fit(LitNet(), loader())
    before.save_checkpoint(tmp_path / "saved")
    module = LitNet()
    after.validate(module, loader(), ckpt_path=tmp_path / "saved", verbose=False)
    assert_weights(module.state_dict(), before.lightning_module.state_dict(), tolerance=0)


class LitChoice(LitNet):
    """Module that trains some of its layers, in the given order."""

    def __init__(self, *layers: int, kind: Any = torch.optim.Adam) -> None:
        super().__init__()
        self.layers, self.kind = layers, kind

    def configure_optimizers(self):
        self.net.requires_grad_(False)
        chosen = [self.net[layer].requires_grad_(True) for layer in self.layers]
        return self.kind([p for layer in chosen for p in layer.parameters()], lr=1e-2)


@pytest.mark.parametrize("format", ["file", "folder"])
def test_optimizer_states_belong_to_names(format, tmp_path):
    place = Place(layout={"checkpoint_format": format})

    def fit(module, epochs, resume=None):
        L.seed_everything(1, verbose=False)
        trainer = make_trainer(place, max_epochs=epochs)
        trainer.fit(module, loader(), ckpt_path=resume)
        return trainer, weights(trainer)

    trainer, _ = fit(LitChoice(0, 2), 1)
    saved = tmp_path / "saved"
    trainer.save_checkpoint(saved)
    expected = fit(LitChoice(0, 2), 2, saved)[1]
    assert_weights(fit(LitChoice(2, 0), 2, saved)[1], expected)
    with pytest.raises(CheckpointError, match=r"'net.4.weight' is in parameter group 0 .*InitFrom"):
        fit(LitChoice(2, 4), 2, saved)
    with pytest.raises(CheckpointError, match=r"options \['amsgrad', .* SGD has \['dampening'"):
        fit(LitChoice(0, 2, kind=torch.optim.SGD), 2, saved)


class LitRenamed(LitChoice):
    def on_load_checkpoint(self, checkpoint):
        weights = checkpoint["state_dict"]
        for name in list(weights):
            weights[name.replace("net", "renamed")] = weights.pop(name)

    def __setattr__(self, name, value):
        super().__setattr__("renamed" if name == "net" else name, value)

    def __getattr__(self, name):
        return super().__getattr__("renamed" if name == "net" else name)


def test_file_resumes_under_other_names(tmp_path):
    trainer = make_trainer(Place(), max_epochs=1)
    trainer.fit(LitChoice(0, 2), loader())
    trainer.save_checkpoint(tmp_path / "saved")
    renamed = make_trainer(Place(), max_epochs=2)
    renamed.fit(LitRenamed(0, 2), loader(), ckpt_path=tmp_path / "saved")
    assert renamed.global_step == 8


class OwnFormat(torch.optim.SGD):
    """Its state has no parameter groups."""

    def state_dict(self):
        return {"inner": super().state_dict()}

    def load_state_dict(self, state):
        super().load_state_dict(state["inner"])


def test_optimizer_with_its_own_format_resumes(tmp_path):
    def fit(epochs, resume=None):
        trainer = make_trainer(Place(layout={"checkpoint_format": "file"}), max_epochs=epochs)
        kind = partial(OwnFormat, momentum=0.9)
        trainer.fit(LitChoice(0, 2, kind=kind), loader(), ckpt_path=resume)
        return trainer

    fit(1).save_checkpoint(tmp_path / "saved")
    assert fit(2, tmp_path / "saved").global_step == 8


class LitTwoOptimizers(LitNet):
    automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD([value]) for value in self.parameters()][:2]


def test_other_number_of_optimizers_is_refused(written):
    trainer = make_trainer(Place(), max_epochs=2)
    with pytest.raises(CheckpointError, match=r"of 1 optimizer\(s\), but the module has 2"):
        trainer.fit(LitTwoOptimizers(), loader(), ckpt_path=written[1]["one"])


def test_folder_is_written_on_request(tmp_path):
    _, path = train(0, Place(layout={"checkpoint_format": "folder"}), str(tmp_path), 1)
    assert is_checkpoint(path)


class Reader(L.Callback):
    """Callback that reads checkpoint folders."""

    needs_checkpoint_folders = True


class LitWithReader(LitNet):
    """Module that configures the callback itself."""

    def configure_callbacks(self):
        return [Reader()]


@pytest.mark.parametrize("format", ["auto", "file"])
@pytest.mark.parametrize("module", [LitNet, LitWithReader])
def test_folder_is_written_for_callback_unless_file_is_requested(module, format, tmp_path):
    own = [Reader()] if module is LitNet else []
    place = Place(layout={"checkpoint_format": format})
    trainer = make_trainer(
        place, max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path, callbacks=own
    )
    trainer.fit(module(), loader())
    assert is_checkpoint(trainer.checkpoint_callback.best_model_path) == (format == "auto")


def test_file_plugin_with_folder_callback_is_refused(tmp_path):
    options = {"plugins": [Counting()], "callbacks": [Reader()], "default_root_dir": tmp_path}
    trainer = make_trainer(ONE, enable_checkpointing=True, **options)
    with pytest.raises(
        MisconfigurationException,
        match=r"Counting.*Reader needs folders, unless checkpoint_format='file'",
    ):
        trainer.fit(LitNet(), loader())


@pytest.mark.parametrize(
    ("place", "options", "words"),
    [
        (PIPELINE, {}, "t1 p2 d1 cuts the model"),
        (SHARDED, {}, "shard='optimizer'"),
        (Place(layout={"async_save": True}), {}, "async_save=True"),
        (ONE, {"precision": "bf16-true"}, "master_weights=True"),
        (Place(layout={"offload_optimizer": True}), {}, "offload_optimizer=True"),
    ],
)
def test_single_file_with_unsupported_option_is_refused(place, options, words, tmp_path):
    asked = Place(world_size=place.world_size, layout={**place.layout, "checkpoint_format": "file"})
    trainer = make_trainer(asked, enable_checkpointing=True, default_root_dir=tmp_path, **options)
    with pytest.raises(
        MisconfigurationException, match=rf"checkpoint_format='file', but .*({words})"
    ):
        trainer.fit(LitNet(), loader())


class Counting(TorchCheckpointIO):
    """User plugin that counts its saves."""

    saved = 0

    def save_checkpoint(self, *args, **kwargs):
        self.saved += 1
        super().save_checkpoint(*args, **kwargs)


def test_user_plugin_writes_files(tmp_path):
    plugin = Counting()
    saves = {"plugins": [plugin], "max_epochs": 1, "default_root_dir": tmp_path}
    trainer = make_trainer(ONE, enable_checkpointing=True, **saves)
    trainer.fit(LitNet(), loader())
    assert plugin.saved == 1
    make_trainer(ONE, **saves | {"max_epochs": 2}).fit(
        LitNet(), loader(), ckpt_path=trainer.checkpoint_callback.best_model_path
    )


@pytest.mark.parametrize(
    ("layout", "options", "words"),
    [
        ({}, {"precision": "bf16-true"}, "master_weights=True"),
        ({"offload_optimizer": True}, {}, "offload_optimizer=True"),
    ],
)
def test_plugin_is_refused_with_copies_of_parameters(layout, options, words, tmp_path):
    """The folder would be written without the plugin."""
    trainer = make_trainer(
        Place(layout=layout),
        enable_checkpointing=True,
        plugins=[Counting()],
        default_root_dir=tmp_path,
        **options,
    )
    with pytest.raises(MisconfigurationException, match=rf"Counting.* writes one file.*{words}"):
        trainer.fit(LitNet(), loader())


def test_unused_plugin_is_accepted(pool):
    pool.run(fit_with_plugin, world_size=2, args=(PIPELINE,))


def fit_with_plugin(rank, place):
    make_trainer(place, plugins=[Counting()], max_epochs=1).fit(LitNet(), loader())


class Broken:
    def __reduce__(self):
        raise OSError("no space left")


def test_failed_write_keeps_previous_file(tmp_path):
    path = tmp_path / "a.ckpt"
    write_file({"state_dict": {"a": torch.ones(2)}}, path)
    with pytest.raises(CheckpointError, match="no space left"):
        write_file({"state_dict": {"a": torch.zeros(2)}, "b": Broken()}, path)
    assert torch.load(path)["state_dict"]["a"].tolist() == [1, 1]
    assert sorted(tmp_path.iterdir()) == [path]


def test_file_is_whole_at_any_time(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    write_file({"epoch": 1}, path)
    rename = os.rename

    def watched(source, target):
        assert torch.load(path)["epoch"] == 1
        rename(source, target)
        assert torch.load(path)["epoch"] == 2

    monkeypatch.setattr(os, "rename", watched)
    write_file({"epoch": 2}, path)


class Mode(enum.Enum):
    FAST = 1


class LitTyped(LitNet):
    def __init__(self, root: Path, mode: Mode, loss: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_hyperparameter_types_are_restored_with_weights_only(tmp_path):
    saves = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    trainer = make_trainer(ONE, max_epochs=1, **saves)
    trainer.fit(LitTyped(tmp_path, Mode.FAST), loader())
    path = trainer.checkpoint_callback.best_model_path
    assert torch.load(path, weights_only=True)["hyper_parameters"]["mode"] == 1
    assert dict(LitTyped.load_from_checkpoint(path).hparams) == {
        "root": tmp_path,
        "mode": Mode.FAST,
        "loss": None,
    }
    make_trainer(ONE, max_epochs=2, **saves).fit(
        LitTyped(tmp_path, Mode.FAST), loader(), ckpt_path=path
    )


def test_object_hyperparameters_load_without_weights_only(tmp_path):
    trainer = make_trainer(ONE, max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(LitTyped(tmp_path, Mode.FAST, torch.nn.L1Loss()), loader())
    found = LitTyped.load_from_checkpoint(
        trainer.checkpoint_callback.best_model_path, weights_only=False
    ).hparams
    assert isinstance(found.loss, torch.nn.L1Loss) and found.root == tmp_path


def test_unpicklable_hyperparameters_are_dropped_with_warning(tmp_path):
    with pytest.warns(UserWarning, match="without hyperparameters"):
        write_file({"state_dict": {}, "hyper_parameters": {"f": lambda: 0}}, tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt") == {"state_dict": {}}


@pytest.mark.parametrize("others", [{}, {"hyper_parameters": {"f": lambda: 0}}])
def test_unpicklable_state_is_refused_by_name(others, tmp_path):
    content = {"state_dict": {}, "callbacks": {"mine": lambda: 0}, **others}
    with pytest.raises(CheckpointError, match=r"writing .*a\.ckpt failed"):
        write_file(content, tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
