"""Resume from checkpoints, which do not depend on the layout.

The same layout resumes bitwise equal; other layouts differ by the order of sums.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ptdp.checkpoint import read_metadata, to_lightning_file
from tests.letters import SP, C, M, P, S, T, V
from tests.parity import Parity, assert_weights_near
from tests.tiny_gpt import LitTiny, Run

pytestmark = pytest.mark.thorough

ZB_V = {P: 2, V: 2, M: 4, S: "zb_v"}
LAYOUTS = {
    "one": (1, {}),
    "d2": (2, {}),
    "t2sp": (2, {T: 2, SP: True}),
    "p2v2": (2, {P: 2, V: 2, M: 4}),
    "zb_v": (2, ZB_V),
    "1f1b": (2, {P: 2, M: 4, S: "1f1b"}),
    "c2": (2, {C: 2}),
    "t2p2": (4, {T: 2, P: 2, M: 2}),
    "d4 sharded": (4, {"shard": "optimizer"}),
    "d4 sharded in nodes": (4, {"shard": "optimizer", "data_parallel_replicas": 2}),
    "d4 sharded parameters": (4, {"shard": "parameters", M: 2}),
    "d2zb_v sharded parameters": (4, {**ZB_V, "shard": "parameters"}),
    "d2t2 sharded": (4, {"shard": "optimizer", T: 2, M: 2}),
    "d2t2 sharded parameters": (4, {"shard": "parameters", T: 2, M: 2}),
    "d2zb_v sharded": (4, {**ZB_V, "shard": "optimizer"}),
}


@dataclass(frozen=True, kw_only=True)
class Epochs(Run):
    """Training of epochs with two batches; each ends with a checkpoint in ``folder``.

    The number of epochs limits the training, because Lightning 2.6 trains the first batch twice
    when it resumes at the end of an epoch under ``max_steps``.
    """

    layers: int = 5
    samples: int = 16
    steps: int = -1
    epochs: int = 2
    folder: str | None = None

    @property
    def trainer_options(self):
        return {"max_epochs": self.epochs}

    def make_callbacks(self):
        if self.folder is None:
            return []
        return [
            ModelCheckpoint(self.folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True),
        ]


class Trained:
    """Trainings of both epochs, and of the second epoch from a checkpoint of the first."""

    def __init__(self, parity: Parity, folder: Path) -> None:
        self.parity, self.folder = parity, folder

    def whole(self, name, **options):
        """Return the folder of both checkpoints and the weights; each case is trained once."""
        folder = self.folder / f"{name} {' '.join(map(str, options.values()))}"
        run = Epochs(folder=str(folder), **options)
        return folder, self.parity.result(run.on(LAYOUTS[name]))["final"]

    def resumed(self, name, folder, **options):
        """Resume after the first epoch and return the weights before and after the second."""
        run = Epochs(resume=str(folder / "epoch=0.ckpt"), **options)
        found = self.parity.ranks(run.on(LAYOUTS[name]))[0]
        return found["initial"], found["final"]


@pytest.fixture(scope="module")
def trained(parity, tmp_path_factory):
    return Trained(parity, tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize(
    "name",
    [
        *("p2v2", "zb_v", "c2", "t2p2", "d2t2 sharded", "d4 sharded in nodes"),
        "d2zb_v sharded parameters",
    ],
)
def test_resume_in_same_layout_is_bitwise_equal(name, trained):
    folder, weights = trained.whole(name, dropout=0.2)
    assert_weights_near(trained.resumed(name, folder, dropout=0.2)[1], weights, tolerance=0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("t2p2", "one"),
        ("c2", "t2p2"),
        ("p2v2", "c2"),
        ("one", "t2p2"),
        ("p2v2", "t2sp"),
        ("t2sp", "d2"),
        ("d2", "p2v2"),
        ("zb_v", "1f1b"),
        ("p2v2", "zb_v"),
        ("zb_v", "one"),
        ("d2zb_v sharded", "one"),
        ("t2p2", "d4 sharded"),
        ("d4 sharded", "d4 sharded in nodes"),
        ("d4 sharded in nodes", "d2t2 sharded"),
        ("d4 sharded parameters", "t2p2"),
        ("d2zb_v sharded parameters", "d4 sharded parameters"),
        ("one", "d2zb_v sharded parameters"),
    ],
)
def test_checkpoint_resumes_in_other_layout(before, after, trained):
    folder, _ = trained.whole(before, epochs=1)
    assert_weights_near(trained.resumed(after, folder)[1], trained.whole("one")[1])


@pytest.mark.parametrize(
    ("layout", "others"),
    [
        ("d4 sharded", ("p2v2", "d2zb_v sharded parameters")),
        ("d4 sharded parameters", ("d2t2 sharded",)),
    ],
)
def test_whole_matrices_of_sharded_optimizer_resume_in_other_layout(layout, others, trained):
    folder, weights = trained.whole(layout, muon=True)
    assert_weights_near(trained.resumed(layout, folder, muon=True)[1], weights, tolerance=0)
    for other in others:
        _, found = trained.resumed(other, folder, muon=True)
        assert_weights_near(found, trained.whole("one", muon=True)[1])


@pytest.mark.parametrize("name", ["d2t2 sharded", "d2t2 sharded parameters"])
def test_masters_resume_bitwise_and_load_as_float32_parameters(name, trained):
    """Muon updates the matrices, and AdamW all other parameters."""
    options = {"dropout": 0.2, "precision": "bf16-true", "muon": True}
    folder, weights = trained.whole(name, **options)
    rounded, resumed = trained.resumed(name, folder, **options)
    assert_weights_near(resumed, weights, tolerance=0)
    _, masters = trained.resumed("one", folder, epochs=1, muon=True)
    assert any(not torch.equal(masters[key], value.float()) for key, value in rounded.items()), (
        "the bfloat16 weights are not rounded"
    )
    for key, value in rounded.items():
        assert torch.equal(masters[key].bfloat16(), value), key


def test_checkpoint_records_layout_and_converts_to_one_file(trained, tmp_path):
    folder, weights = trained.whole("p2v2", epochs=1)
    path = folder / "epoch=0.ckpt"
    assert read_metadata(path).run["layout"] == "t1 p2 v2 d1"
    to_lightning_file(path, tmp_path / "single.ckpt")
    module = LitTiny.load_from_checkpoint(tmp_path / "single.ckpt", run=Run(layers=5, eager=True))
    assert torch.equal(module.model.wte.weight, weights["model.wte.weight"])
    assert module.model.head.weight is module.model.wte.weight
