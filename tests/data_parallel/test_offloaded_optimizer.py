"""An optimizer whose states and parameters are in the host's memory."""

from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import lightning.pytorch as L
import pytest
import torch

from lightning_ptdp.data_parallel import reduction
from lightning_ptdp.data_parallel.deferred_step import DeferredStep
from lightning_ptdp.models import AdamWConfig, GPTConfig, LitGPT
from lightning_ptdp.planner.memory import rank_memory
from lightning_ptdp.strategy import PTDPStrategy, setup_hooks
from tests.fake_cuda import fake_cuda
from tests.letters import M, P, S, T, V, Z
from tests.parity import checks_of_rank_0
from tests.planner.jobs import choice, small_job
from tests.tiny_gpt import Run

pytestmark = pytest.mark.thorough

OFFLOAD = {"offload_optimizer": True, "bucket_mb": 1e-2}
PLACES = {
    "one": (1, {}),
    "d2": (2, {M: 2}),
    "d2 ZeRO-1": (2, {Z: "optimizer"}),
    "d2 ZeRO-3": (2, {Z: "parameters", M: 2}),
    "t2": (2, {T: 2}),
    "d2p2v2 zb_v ZeRO-2": (4, {P: 2, V: 2, M: 2, S: "zb_v", Z: "gradients"}),
}


class Defers(PTDPStrategy):
    """Defers steps although a callback reads parameters between them, on all ranks alike."""

    def _prepare_optimization(self, trainer):
        with mock.patch.object(setup_hooks, "reads_between_steps", return_value=False):
            super()._prepare_optimization(trainer)
        self.defers = self.engine.gradients.stepped._deferred is not None


@dataclass(frozen=True, kw_only=True)
class DeferredRun(Run):
    def make_strategy(self):
        return Defers(**self.layout)

    def results(self, trainer, module):
        return {"defers": trainer.strategy.defers}


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("name", PLACES)
def test_offload_changes_no_bit(name, precision, parity):
    world_size, layout = PLACES[name]
    run = Run(precision=precision, accumulate=2).on((world_size, {**layout, "bucket_mb": 1e-2}))
    expected = parity.ranks(run)
    found = parity.ranks(DeferredRun(**vars(run)).on((world_size, OFFLOAD)))
    for one, other in zip(found, expected, strict=True):
        assert one["defers"]
        assert one["losses"] == other["losses"]
        assert one["norms"] == pytest.approx(other["norms"], rel=1e-6)
        for key, value in one["final"].items():
            torch.testing.assert_close(value, other["final"][key], rtol=0, atol=1e-7)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_checkpoint_loads_with_and_without_offload(precision, parity, tmp_path):
    """The states are saved alike. A float32 parameter and its copy are saved once."""
    run = Run(precision=precision, steps=2).on((2, {Z: "optimizer", "bucket_mb": 1e-2}))
    resumed, sizes = [], []
    for number, saves in enumerate(({}, OFFLOAD)):
        saved = str(tmp_path / f"{number}.ckpt")
        started, *_ = parity.ranks(replace(run, save=saved).on((2, saves)))
        sizes.append(sum(file.stat().st_size for file in Path(saved).rglob("*.safetensors")))
        resumed += [
            parity.ranks(replace(run, steps=4, resume=saved).on((2, loads)))[0]["final"]
            for loads in ({}, OFFLOAD)
        ]
    assert sizes[0] == sizes[1] > 0
    expected, *others = resumed
    assert any(not torch.equal(value, started["final"][key]) for key, value in expected.items())
    for key, value in expected.items():
        for other in others:
            torch.testing.assert_close(other[key], value, rtol=0, atol=1e-7)


@dataclass
class _Devices(L.Callback):
    """Notes where the optimizer's tensors and the weights are after each step."""

    def __post_init__(self):
        self.optimizer = set[str]()
        self.module = set[str]()

    def on_train_batch_end(self, trainer, module, *_):
        (optimizer,) = trainer.optimizers
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        states = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        self.optimizer |= {tensor.device.type for tensor in (*stepped, *states)}
        self.module |= {parameter.device.type for parameter in module.parameters()}


def _fit_on_fake_gpu(rank, size, options, precision, watches=True):
    torch.manual_seed(0)
    config = GPTConfig.gpt2(
        vocabulary_size=32, sequence_length=8, num_layers=2, hidden_size=16, num_heads=4
    )
    rows = [
        {"input_ids": row[:-1].clone(), "labels": row[1:].clone()}
        for row in torch.randint(32, (24, 9))
    ]
    devices = _Devices()
    plain = torch.empty
    locked = []

    def empty(*args, pin_memory=False, **kwargs):
        locked.append(pin_memory)
        return plain(*args, **kwargs)

    with (
        fake_cuda(rank) as waits,
        mock.patch.object(reduction, "_is_gloo", return_value=False),
        mock.patch.object(torch, "empty", empty),
    ):
        trainer = L.Trainer(
            strategy=(strategy := PTDPStrategy(process_group_backend="gloo", **OFFLOAD, **options)),
            accelerator="gpu",
            devices=size,
            max_epochs=1,
            gradient_clip_val=0.5,
            precision=precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[devices] if watches else [],
        )
        steps = mock.patch.object(
            DeferredStep, "start", autospec=True, side_effect=DeferredStep.start
        )
        with checks_of_rank_0(rank), steps as deferred:
            trainer.fit(
                LitGPT(config, AdamWConfig(learning_rate=1e-3)),
                torch.utils.data.DataLoader(rows, batch_size=4),
            )
        return {
            "deferred": deferred.call_count,
            "weights": strategy.gather_state_dict(),
            "optimizer": devices.optimizer,
            "module": devices.module,
            "locked": any(locked),
            "waits": [wait.place for wait in waits.batches[-1]],
            "all waits": {wait.place for batch in waits.batches for wait in batch},
        }


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("options", [{}, {Z: "optimizer", M: 2}], ids=["d2", "d2 ZeRO-1"])
def test_states_of_gpu_are_on_host(options, precision, pool):
    for found in pool.run(_fit_on_fake_gpu, world_size=2, args=(2, options, precision)):
        assert found["optimizer"] == {"cpu"}
        assert found["module"] == {"cuda"}
        assert found["locked"]
        assert "data_parallel/optimizer_parameters.py _like" not in found["all waits"]


@pytest.mark.parametrize("options", [{}, {Z: "optimizer"}, {Z: "parameters"}], ids=str)
def test_deferred_steps_of_gpu_change_nothing(options, pool):
    found, expected = (
        pool.run(
            _fit_on_fake_gpu,
            world_size=2,
            args=(2, {**options, "overlap_parameter_gather": overlaps}, "bf16-true", False),
        )
        for overlaps in (True, False)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["deferred"] == 3
        assert theirs["deferred"] == 0
        for name, value in theirs["weights"].items():
            torch.testing.assert_close(ours["weights"][name], value, rtol=0, atol=1e-6)
        assert len(ours["waits"]) <= len(theirs["waits"])


def test_planner_counts_no_states_on_device():
    job = small_job(GPTConfig.gpt2(), precision="bf16-true")
    offloaded = replace(job, offloads_optimizer=True)
    assert rank_memory(offloaded, choice(), 0).optimizer == 0
    assert rank_memory(job, choice(), 0).optimizer > 0
