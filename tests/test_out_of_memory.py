"""Out of memory on a rank: the error explains expected memory, excess and remedies.

The other ranks end too.
"""

import time

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.strategy.checks.machine_limits import check_gpu
from lightning_ptdp.strategy.out_of_memory import memory_note
from tests.letters import M, P, T
from tests.parity import make_trainer
from tests.tiny_gpt import LitTiny, PaddedTokens, Run

pytestmark = pytest.mark.thorough

GIB = 2.0**30


class LitFull(LitTiny):
    """Module that runs out of memory in the second forward of its last block."""

    calls = 0

    def on_train_start(self):
        block = self.model.blocks[-1]
        if list(block.parameters()):  # not a placeholder
            block.register_forward_pre_hook(self._fill)

    def _fill(self, *_):
        self.calls += 1
        if self.calls == 2:
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")


def error_of(rank, layout, world_size):
    """Return the error type, the notes and the time of a failing fit on this rank."""
    trainer = make_trainer(PTDPStrategy(**layout), world_size, max_steps=4, precision="bf16-true")
    start = time.monotonic()
    try:
        trainer.fit(LitFull(Run()), DataLoader(PaddedTokens(16), batch_size=8))
    except Exception as error:
        return (
            type(error).__name__,
            [str(error), *getattr(error, "__notes__", [])],
            time.monotonic() - start,
        )
    return "nothing", [], 0.0


@pytest.mark.parametrize("layout", [{}, {P: 2, M: 4, "timeout_s": 6}], ids=["1", "p2"])
def test_out_of_memory_in_step_is_explained(layout, pool):
    size = layout.get(P, 1)
    *others, (kind, notes, _) = pool.run(error_of, world_size=size, args=(layout, size))
    assert kind == "OutOfMemoryError", notes
    (note,) = [note for note in notes if "GiB on this rank" in note]
    lines = [line.split() for line in note.splitlines()]
    assert [line[0] for line in lines[1:5]] == [
        "parameters",
        "gradients",
        "optimizer",
        "activations",
    ]
    assert all(len(line) == 3 and line[1] != "?" for line in lines[1:5]), note
    assert "recompute='full' or 'offload' (it is 'none')" in note or "activations" not in lines[5]
    assert f"pipeline_parallel_size (it is {size})" in note
    offered = note.partition("layouts that fit, by the planner's estimate:\n")[2].splitlines()
    assert offered and all(
        line.startswith("  PTDPStrategy(") and line.endswith(" GiB") for line in offered
    )
    for kind, _, after in others:
        assert kind == "PeerError" and after < 30


def test_out_of_memory_in_setup_is_explained(monkeypatch):
    def full(self):
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    monkeypatch.setattr(PTDPStrategy, "model_to_device", full)
    kind, notes, _ = error_of(0, {}, 1)
    assert kind == "OutOfMemoryError", notes
    assert any(
        "while the model was set up. Use a larger tensor_parallel_size (it is 1)" in note
        for note in notes
    )


EXPECTED = {
    "parameters": 2 * GIB,
    "gradients": 4 * GIB,
    "optimizer": 12 * GIB,
    "activations": 20 * GIB,
}


@pytest.mark.parametrize(
    ("options", "found", "words"),
    [
        (
            {},
            EXPECTED,
            [
                "activations: the largest part. Use ",
                "recompute='full' or 'offload'",
                "num_microbatches (it is 1)",
            ],
        ),
        (
            {"recompute": "full", "micro_batch_size": 4, T: 2},
            {**EXPECTED, "activations": 31 * GIB},
            [
                "20.00",
                "31.00",
                "activations: more than expected. Use a smaller micro_batch_size (it is 4), or "
                "sequence_parallel=True, or",
            ],
        ),
        (
            {},
            {**EXPECTED, "optimizer": 14 * GIB},
            [
                "optimizer: more than expected. Use shard='optimizer', or offload_optimizer=True, or a"
            ],
        ),
        (
            {"shard": "optimizer", "offload_optimizer": True},
            {**EXPECTED, "optimizer": 14 * GIB},
            ["optimizer: more than expected. Use a larger tensor_"],
        ),
    ],
)
def test_memory_note_names_cause_and_remedies(options, found, words):
    config = PTDPConfig(**options)
    note = memory_note(EXPECTED, found, config=config, layout=config.layout(4))
    for word in words:
        assert word in note, note


def test_expert_parallelism_is_suggested_first_for_moe():
    config = PTDPConfig(expert_parallel_size=2)
    found = {**EXPECTED, "parameters": 3 * GIB}
    note = memory_note(EXPECTED, found, config=config, layout=config.layout(4), mixture=True)
    assert (
        "parameters: more than expected. Use shard='parameters', or a larger "
        "expert_parallel_size (it is 2), "
        "tensor_parallel_size (it is 1)" in note
    )


CUDA_12 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100a", "sm_120", "compute_120")


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        ((7, 0), False),
        ((7, 5), True),
        ((8, 9), True),
        ((9, 0), True),
        ((10, 3), False),
        ((12, 1), True),
        ((13, 0), True),
    ],
)
def test_torch_without_kernels_for_gpu_is_refused(capability, runs):
    if runs:
        check_gpu("a GPU", capability, kernels=CUDA_12, precision="16-mixed")
        return
    with pytest.raises(
        ValueError,
        match=r"no kernels for a GPU \(compute capability .*, only for sm_75, .*\. Install a torch",
    ):
        check_gpu("a GPU", capability, kernels=CUDA_12, precision="16-mixed")


def test_gpu_without_bf16_warns():
    with pytest.warns(
        UserWarning,
        match="precision='bf16-true' is slow on Tesla T4 .* computes in float32 instead. Use precision='16-true'",
    ):
        check_gpu("Tesla T4", (7, 5), kernels=CUDA_12, precision="bf16-true")


def test_activations_without_estimate_are_suspected():
    known = {name: value for name, value in EXPECTED.items() if name != "activations"}
    note = memory_note(known, known, config=PTDPConfig(), layout=PTDPConfig().layout(1))
    assert "activations: the largest part. Use recompute=" in note
