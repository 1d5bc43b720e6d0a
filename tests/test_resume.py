"""A checkpoint belongs to the model: the same layout goes on bitwise, any other within summation
order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ptdp.checkpoint import read_metadata, to_lightning_file
from lightning_ptdp.strategy import PTDPStrategy
from tests.parity import make_trainer
from tests.pool import Pool
from tests.tiny_gpt import LitTiny, PaddedTokens, Run

pytestmark = pytest.mark.thorough

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "d2": (2, {}),
    "t2sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "p2v2": (2, {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "num_microbatches": 4}),
    "zb_v": (
        2,
        {
            "pipeline_parallel_size": 2,
            "virtual_pipeline_size": 2,
            "num_microbatches": 4,
            "schedule": "zb_v",
        },
    ),
    "1f1b": (2, {"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": "1f1b"}),
    "c2": (2, {"context_parallel_size": 2}),
    "t2p2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}),
    "d4 sharded": (4, {"shard_optimizer": True}),
    "d4 sharded in nodes": (4, {"shard_optimizer": True, "data_parallel_replicas": 2}),
    "d2t2 sharded": (
        4,
        {"shard_optimizer": True, "tensor_parallel_size": 2, "num_microbatches": 2},
    ),
    "d2zb_v sharded": (
        4,
        {
            "pipeline_parallel_size": 2,
            "virtual_pipeline_size": 2,
            "num_microbatches": 4,
            "schedule": "zb_v",
            "shard_optimizer": True,
        },
    ),
}


class WithDropout(LitTiny):
    """Dropout makes an exact resume need the random numbers too."""

    def configure_model(self) -> None:
        super().configure_model()
        for module in self.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2


def _train(
    rank: int,
    name: str,
    epochs: int,
    save: str | None,
    resume: str | None,
    dropout: bool,
    precision: str = "32-true",
) -> dict[str, torch.Tensor]:
    world_size, layout = LAYOUTS[name]
    L.seed_everything(3, verbose=False)
    callbacks = []
    if save is not None:
        folder, stem = Path(save).parent, Path(save).stem
        callbacks.append(
            ModelCheckpoint(
                dirpath=folder, filename=stem, every_n_epochs=1, save_on_train_epoch_end=True
            )
        )
    trainer = make_trainer(
        PTDPStrategy(**layout),
        world_size,
        max_epochs=epochs,
        callbacks=callbacks,
        gradient_clip_val=0.05,
        precision=precision,
    )
    data = PaddedTokens(32)
    sampler = DistributedSampler(data, **trainer.strategy.distributed_sampler_kwargs, shuffle=False)
    replicas = trainer.strategy.layout.data_parallel_size
    module = (WithDropout if dropout else LitTiny)(Run(layers=5))
    trainer.fit(
        module, DataLoader(data, batch_size=8 // replicas, sampler=sampler), ckpt_path=resume
    )
    return trainer.strategy.gather_state_dict()


@pytest.fixture(scope="module")
def uninterrupted(pool: Pool) -> dict[str, torch.Tensor]:
    return pool.run(_train, world_size=1, args=("one", 2, None, None, False))[0]


@pytest.mark.parametrize(
    "name", ["p2v2", "zb_v", "c2", "t2p2", "d2t2 sharded", "d4 sharded in nodes"]
)
def test_the_same_layout_goes_on_bitwise_with_dropout(
    name: str, pool: Pool, tmp_path: Path
) -> None:
    world_size, path = LAYOUTS[name][0], str(tmp_path / "half.ckpt")
    whole = pool.run(_train, world_size=world_size, args=(name, 2, None, None, True))[0]
    pool.run(_train, world_size=world_size, args=(name, 1, path, None, True))
    resumed = pool.run(_train, world_size=world_size, args=(name, 2, None, path, True))[0]
    for key, value in whole.items():
        assert torch.equal(resumed[key], value), key


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
    ],
)
def test_any_layout_reads_what_any_other_wrote(
    before: str, after: str, pool: Pool, tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    path = str(tmp_path / "half.ckpt")
    pool.run(_train, world_size=LAYOUTS[before][0], args=(before, 1, path, None, False))
    resumed = pool.run(_train, world_size=LAYOUTS[after][0], args=(after, 2, None, path, False))[0]
    assert resumed.keys() == uninterrupted.keys()
    for key, value in uninterrupted.items():
        assert (resumed[key] - value).norm() / value.norm() < 1e-5, key


def test_masters_go_on_bitwise_and_become_the_parameters_of_float32(
    pool: Pool, tmp_path: Path
) -> None:
    path, name = str(tmp_path / "half.ckpt"), "d2t2 sharded"
    whole = pool.run(_train, world_size=4, args=(name, 2, None, None, True, "bf16-true"))[0]
    rounded = pool.run(_train, world_size=4, args=(name, 1, path, None, True, "bf16-true"))[0]
    resumed = pool.run(_train, world_size=4, args=(name, 2, None, path, True, "bf16-true"))[0]
    for key, value in whole.items():
        assert torch.equal(resumed[key], value), key
    masters = pool.run(_train, world_size=1, args=("one", 1, None, path, False, "32-true"))[0]
    assert any(not torch.equal(masters[key], value.float()) for key, value in rounded.items()), (
        "these are rounded"
    )
    for key, value in rounded.items():
        assert torch.equal(masters[key].bfloat16(), value), key


def test_a_checkpoint_tells_its_layout_and_becomes_one_file(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    weights = pool.run(_train, world_size=2, args=("p2v2", 1, str(path), None, False))[0]
    assert read_metadata(path).run["layout"] == "t1 p2 v2 d1"
    to_lightning_file(path, tmp_path / "single.ckpt")
    module = LitTiny.load_from_checkpoint(tmp_path / "single.ckpt", run=Run(layers=5, eager=True))
    assert torch.equal(module.model.wte.weight, weights["model.wte.weight"])
    assert module.model.head.weight is module.model.wte.weight
