"""Initial weights from a checkpoint with another layout, other names or missing tensors."""

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ptdp.callbacks import InitFrom
from lightning_ptdp.checkpoint import CheckpointError, load_tensors, read_full, save_checkpoint
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.strategy import PTDPStrategy
from tests.parity import make_trainer
from tests.tiny_gpt import LitTiny, PaddedTokens, Run


class Weights(L.Callback):
    """Records the weights at the start of training."""

    def on_train_start(self, trainer, pl_module):
        strategy = trainer.strategy
        self.start = strategy.gather_state_dict()


def _fit(rank, layout, init, save, resume):
    L.seed_everything(3, verbose=False)
    strategy, weights = PTDPStrategy(**layout), Weights()
    trainer = make_trainer(
        strategy, 2, max_steps=1, callbacks=[weights, *([InitFrom(**init)] if init else [])]
    )
    data = PaddedTokens(8)
    sampler = DistributedSampler(data, **strategy.distributed_sampler_kwargs, shuffle=False)
    loader = DataLoader(data, batch_size=8 // strategy.layout.data_parallel_size, sampler=sampler)
    try:
        trainer.fit(LitTiny(Run(layers=4)), loader, ckpt_path=resume)
    except CheckpointError as error:
        return str(error)
    if save:
        trainer.save_checkpoint(save)
    return weights.start


def _rewritten(source, target, change):
    """Write a checkpoint with weights only, under changed names."""
    full = read_full(source)
    tensors = {
        f"model/{change(name)}": value
        for name, value in full.items()
        if name != "model.head.weight" and change(name)
    }
    save_checkpoint(
        target,
        tensors={
            name: (value, Placement.replicated(tuple(value.shape)))
            for name, value in tensors.items()
        },
        state={},
        metadata={},
    )


def test_weights_load_across_layouts_and_names(pool, tmp_path):
    trained, p2, t2 = (
        tmp_path / "trained",
        {"pipeline_parallel_size": 2, "num_microbatches": 2},
        {"tensor_parallel_size": 2},
    )
    initial = pool.run(_fit, world_size=2, args=(p2, None, str(trained), None))[0]
    wanted = read_full(trained)
    found = pool.run(_fit, world_size=2, args=(t2, {"path": str(trained)}, None, None))[0]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert not torch.equal(found["model.wte.weight"], initial["model.wte.weight"])

    _rewritten(trained, tmp_path / "renamed", lambda name: name.replace("model.", "net.", 1))
    init = {"path": str(tmp_path / "renamed"), "rename": {"model.": "net."}}
    found = pool.run(_fit, world_size=2, args=(p2, init, None, None))[0]
    assert all(torch.equal(found[name], value) for name, value in wanted.items())

    _rewritten(trained, tmp_path / "part", lambda name: None if ".0." in name else name)
    init = {"path": str(tmp_path / "part")}
    for message in pool.run(_fit, world_size=2, args=(p2, init, None, None)):
        assert "not in the checkpoint" in message
    found = pool.run(_fit, world_size=2, args=(p2, {**init, "strict": False}, None, None))[0]
    for name, value in wanted.items():
        assert torch.equal(found[name], initial[name] if ".0." in name else value), name
    for message in pool.run(_fit, world_size=2, args=(p2, None, None, str(tmp_path / "part"))):
        assert "has weights but no training state" in message


def test_rename_collision_is_refused(tmp_path):
    one = {name: (torch.ones(2), Placement.replicated((2,))) for name in ("a.x", "b.x")}
    save_checkpoint(tmp_path / "c", tensors={"c.x": one["a.x"]}, state={}, metadata={})
    with pytest.raises(CheckpointError, match=r"'a\.x' and 'b\.x' are both 'c\.x'"):
        load_tensors(tmp_path / "c", one, rename={"a.": "c.", "b.": "c."})
    found = {"a.x": (torch.zeros(2), Placement.replicated((2,)))}
    assert load_tensors(tmp_path / "c", found, rename={"a.": "nothing.", "a.x": "c.x"}) == []
    assert found["a.x"][0].tolist() == [1, 1]
