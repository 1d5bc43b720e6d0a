"""Checks in a child process, which keep the parent process forkable."""

import gc
import os
import signal
import tempfile

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader

from lightning_ptdp.base.forked_processes import in_child
from lightning_ptdp.shims.torch import without_data
from lightning_ptdp.strategy import PTDPStrategy
from tests.pool import in_new_process
from tests.tiny_gpt import LitTiny, PaddedTokens, Run


def test_result_of_child_process_is_returned():
    here, given = os.getpid(), nn.Linear(2, 2)  # captured objects need not be pickled
    assert in_child(lambda: (os.getpid() != here, given.in_features)) == (True, 2)


def test_error_and_exit_code_of_child_process_are_raised():
    def fails():
        raise ValueError("the model is a poem")

    with pytest.raises(ValueError, match="the model is a poem"):
        in_child(fails)
    with pytest.raises(RuntimeError, match="ended with exit code -9"):
        in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))


def _follows():
    with without_data():
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    in_child(torch.ones((), requires_grad=True).backward)


class _SharesTheParentsObjects(Callback):
    """Callback that fails if garbage collection in a rank would copy all memory pages."""

    def on_train_start(self, *_):
        assert gc.get_freeze_count() > 10_000


def _fits(*, returns_weights=True, **options):
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PTDPStrategy(start_method="fork", **options),
        max_steps=1,
        callbacks=[_SharesTheParentsObjects()],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.strategy.returns_weights = returns_weights
    module = LitTiny(Run())
    trainer.fit(module, DataLoader(PaddedTokens(64), batch_size=8))
    return module


def _chooses():
    _fits(layout="auto")


def _comes_too_late():
    torch._C._ensureCUDADeviceGuardSet()  # as on a machine with a GPU
    torch.ones((), requires_grad=True).backward()
    with pytest.raises(
        ProcessRaisedException, match="Do not use the GPU or run a backward before fit"
    ):
        _fits()


def _returns_weights_through_memory():
    """Assert that no weights are left in the temporary folder, unlike with Lightning."""
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        trained = _fits(pipeline_parallel_size=2, num_microbatches=2)
        assert not os.listdir(folder)
        kept = _fits(pipeline_parallel_size=2, num_microbatches=2, returns_weights=False)
    initial = list(LitTiny(Run()).parameters())
    assert len(list(kept.parameters())) == len(initial)
    assert all(map(torch.equal, kept.parameters(), initial))
    assert not any(map(torch.equal, trained.parameters(), initial))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU any backward starts threads")
@pytest.mark.parametrize(
    "part", [_follows, _chooses, _comes_too_late, _returns_weights_through_memory]
)
def test_fork_start_method_in_new_process(part):
    """A new process is needed because only its first backward starts threads."""
    assert in_new_process(part) == 0
