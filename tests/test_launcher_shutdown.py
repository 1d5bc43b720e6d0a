"""Termination of launched processes after one of them is lost."""

from types import SimpleNamespace

import lightning.pytorch as L
import pytest

from lightning_ptdp.callbacks import SaveOnSignal
from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.shims.lightning import lightning_names
from lightning_ptdp.strategy import PTDPStrategy, launch


def strategy(start_method):
    return L.Trainer(
        strategy=PTDPStrategy(start_method=start_method), accelerator="cpu", devices=2, logger=False
    ).strategy


@pytest.mark.parametrize("told", [True, False])
def test_forked_rank_waits_for_sigterm_unless_received(monkeypatch, told):
    slept = []
    monkeypatch.setattr(launch, "time", SimpleNamespace(sleep=slept.append))
    ours = strategy("fork")
    ours._run = SimpleNamespace(stop_request=SimpleNamespace(received=told))
    launcher = lightning_names("lightning.pytorch").MultiProcessingLauncher

    def lose_a_peer(*_):
        raise PeerError("rank 0 was lost")

    monkeypatch.setattr(launcher, "_wrapping_function", lose_a_peer)
    with pytest.raises(PeerError):
        ours.launcher._wrapping_function(1, None)
    assert slept == ([] if told else [launch._LAST_WORD_S])


def test_sigterm_before_lost_peer_is_reported_to_launcher():
    ours, callback = strategy("fork"), SaveOnSignal()
    ours._run = SimpleNamespace(stop_request=SimpleNamespace(received=False))
    trainer = SimpleNamespace(strategy=ours)
    callback.on_exception(trainer, L.LightningModule(), PeerError("rank 0 was lost"))
    assert not ours.stop_requested
    callback._notes.received.add(15)
    callback.on_exception(trainer, L.LightningModule(), PeerError("rank 0 was lost"))
    assert ours.stop_requested
