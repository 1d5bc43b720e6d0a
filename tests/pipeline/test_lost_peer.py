"""The surviving rank names a peer that is frozen or killed. Real processes."""

import contextlib
import io
import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptdp.callbacks import ExpertLoad
from lightning_ptdp.checkpoint import single_file
from lightning_ptdp.checkpoint.checksums import SummingFile
from lightning_ptdp.checkpoint.save_agreement import own_rank
from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.pipeline.watchdog import Watchdog
from lightning_ptdp.schedule import Action
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh
from tests.conformance.toys import LitNet, Place, loader, make_trainer
from tests.expert_parallel.toy import LENGTH, VOCABULARY, LitMixture, Run
from tests.pipeline.two_processes import HANGS_S, two_processes

pytestmark = pytest.mark.thorough

LIMIT_S = 3.0
SAVE_LIMIT_S = 5.0
"""Timeout of the process groups and of the watchdog while saving."""


def _lose(rank, victim, how, where):
    """Publish both statuses, then lose ``victim`` while its peer receives or reduces."""
    mesh = ProcessMesh.create(
        layout=ParallelLayout(world_size=2, pipeline_parallel_size=2), rank=rank
    )
    group = dist.new_group([0, 1], timeout=timedelta(seconds=LIMIT_S))
    watched = Watchdog.create(mesh=mesh, limit_s=LIMIT_S)
    peer = 1 - rank
    with watched.during("step 12"):
        watched.started(Action.parse(f"F{rank}.3"))
        for _ in range(2):  # both publish, then both read
            assert watched.publish()
            dist.barrier()
        if rank == victim:
            os.kill(os.getpid(), how)
        if where == "reduce":
            dist.all_reduce(torch.zeros(3), group=group)
        else:
            watched.waiting(f"F{rank}.3", peer)
            dist.recv(torch.zeros(3), peer, group=group)


class _Loses(LitNet):
    """Model whose victim rank freezes or dies in the second step."""

    def __init__(self, victim: int, how: int) -> None:
        super().__init__()
        self.victim, self.how = victim, how

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and own_rank() == self.victim:
            os.kill(os.getpid(), self.how)
        return super().training_step(batch, batch_idx)


def _train(rank, victim, how, where):
    layout = {"pipeline_parallel_size": 2, "num_microbatches": 4, "timeout_s": 8.0}
    with contextlib.redirect_stderr(io.StringIO()):
        make_trainer(Place(world_size=2, layout=layout), default_root_dir=where).fit(
            _Loses(victim, how), loader()
        )


class _LosesBetweenSteps(LitNet):
    """Model whose victim rank dies in a hook; its peer enters a collective outside of a step."""

    def __init__(self, victim: int, hook: str) -> None:
        super().__init__()
        self.victim, self.hook = victim, hook

    def _maybe_die(self, hook):
        if hook == self.hook and self.trainer.global_rank == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_before_optimizer_step(self, optimizer):
        self._maybe_die("norm")

    def on_save_checkpoint(self, checkpoint):
        self._maybe_die("save")

    def on_load_checkpoint(self, checkpoint):
        self._maybe_die("load")


def _train_between(rank, victim, hook, where):
    layout = {"pipeline_parallel_size": 2, "num_microbatches": 4, "timeout_s": 8.0}
    place, path, module = (
        Place(world_size=2, layout=layout),
        Path(where, "one.ckpt"),
        _LosesBetweenSteps(victim, hook),
    )
    first = make_trainer(place, default_root_dir=where, max_steps=1, gradient_clip_val=1.0)
    first.fit(module, loader())
    first.save_checkpoint(path)
    second = make_trainer(place, default_root_dir=where, max_steps=2)
    second.fit(_LosesBetweenSteps(victim, hook), loader(), ckpt_path=path)


def _train_sharded(rank, victim, where):
    options = {"shard": "optimizer", "timeout_s": 8.0, "overlap_parameter_gather": False}
    make_trainer(Place(world_size=2, layout=options), default_root_dir=where, max_steps=1).fit(
        _LosesBetweenSteps(victim, "norm"), loader()
    )


class _LosesInExperts(LitMixture):
    """Model whose victim rank dies in the second step, before an expert exchange of gradients."""

    def __init__(self, victim: int) -> None:
        super().__init__(Run())
        self.victim = victim

    def on_fit_start(self):
        if self.trainer.global_rank == self.victim:
            self.layers[2].experts.register_forward_hook(self._after)

    def _after(self, module, args, output):
        if self.trainer.global_step == 1:
            output.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))


def _train_experts(rank, victim, where):
    place = Place(world_size=2, layout={"expert_parallel_size": 2, "timeout_s": 8.0})
    ids = torch.randint(VOCABULARY, (32, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    trainer = make_trainer(place, default_root_dir=where, callbacks=[ExpertLoad()])
    trainer.fit(_LosesInExperts(victim), DataLoader(TensorDataset(ids), batch_size=4))


def _save(rank, victim, layout, where):
    """Freeze ``victim`` while it writes a checkpoint."""
    place = Place(world_size=2, layout={"timeout_s": SAVE_LIMIT_S, **layout})
    if rank == victim:
        SummingFile.write = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
        single_file.save_synced = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    saving = ModelCheckpoint(where, every_n_train_steps=1, save_top_k=-1)
    make_trainer(place, max_steps=4, enable_checkpointing=True, callbacks=[saving]).fit(
        LitNet(), loader()
    )


def _reports(rank, parent, part, *arguments):
    """Run ``part`` and send its error to the parent."""
    try:
        part(rank, *arguments)
        parent.send("no error")
    except BaseException as error:
        parent.send(f"{type(error).__name__}: {error}")


def _said_by_survivor(part, victim, *arguments):
    limit_s = SAVE_LIMIT_S if part is _save else HANGS_S
    with two_processes(_reports, part, victim, *arguments, limit_s=limit_s) as (_, connections):
        survivor = connections[1 - victim]
        assert survivor.poll(HANGS_S), "the survivor hangs"
        return survivor.recv()


@pytest.mark.parametrize(
    ("victim", "how", "where"),
    [
        (1, signal.SIGSTOP, "receive"),
        (0, signal.SIGSTOP, "reduce"),
        (1, signal.SIGKILL, "reduce"),
        (0, signal.SIGKILL, "receive"),
    ],
)
def test_lost_peer_is_named(victim, how, where):
    said = _said_by_survivor(_lose, victim, how, where)
    mine = (
        f"waits in F{1 - victim}.3 for rank {victim}"
        if where == "receive"
        else f"in F{1 - victim}.3"
    )
    assert said.startswith(f"PeerError: rank {1 - victim} (")
    assert f"lost another rank (step 12, {mine})" in said
    assert re.search(rf"rank {1 - victim}: step 12, {mine} since [\d.]+ s \(this rank\)", said)
    heard = r"\d+\.\d s: step 12, in F" + f"{victim}.3"
    assert re.search(rf"  rank {victim}: .*step 12, in F{victim}\.3", said)
    assert re.search(rf"No answer from rank {victim}, for {heard}", said)
    assert (victim == 0) == ("rank 0 (or torchrun), which hosts the store" in said)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_training_names_lost_rank(how, tmp_path):
    said = _said_by_survivor(_train, 1, how, str(tmp_path))
    assert re.match(
        r"PeerError: rank 0 \(.*\) waited in action B0\.\d for rank 1, which did not answer:", said
    )
    assert "Last action of each rank:" in said
    assert re.search(r"rank 0: step 1, waits in B0\.\d for rank 1 since \d", said)
    # A rank reports only now and then, so its progress since the last report is unknown.
    assert re.search(
        r"rank 1: last reported \d+.* ago: "
        if how == signal.SIGSTOP
        else r"rank 1: .* since .* \(reported ",
        said,
    )


@pytest.mark.parametrize(
    ("hook", "place"),
    [
        ("norm", "gradient norm of step 0"),
        ("save", r"saving the checkpoint .*one\.ckpt"),
        ("load", r"loading the model from .*one\.ckpt"),
    ],
)
def test_collective_outside_of_step_names_lost_rank(hook, place, tmp_path):
    said = _said_by_survivor(_train_between, 1, hook, str(tmp_path))
    assert re.match(rf"PeerError: rank 0 \(.*\) lost another rank \({place}\):", said), said
    assert re.search(rf"rank 0: {place} since \d", said)


def test_expert_exchange_reports_lost_rank(tmp_path):
    said = _said_by_survivor(_train_experts, 1, str(tmp_path))
    assert re.match(r"PeerError: rank 0 \(.*\) lost another rank \(step 1\):", said), said
    assert re.search(r"  rank 1: \S", said), said


def test_parameter_gather_after_optimizer_step_reports_lost_rank(tmp_path):
    said = _said_by_survivor(_train_sharded, 1, str(tmp_path))
    assert re.match(r"PeerError: rank 0 \(.*\) lost another rank \(optimizer step 0\):", said), said


@pytest.mark.parametrize(
    ("victim", "layout"),
    [
        *((victim, {"checkpoint_format": "folder"}) for victim in (0, 1)),
        *((victim, {"async_save": True}) for victim in (0, 1)),
        (0, {"checkpoint_format": "file"}),  # written by rank 0 only
    ],
    ids=[
        "0-synchronous",
        "1-synchronous",
        "0-in the background",
        "1-in the background",
        "0-single file",
    ],
)
def test_peer_frozen_while_saving_is_named(victim, layout, tmp_path):
    said = _said_by_survivor(_save, victim, layout, str(tmp_path))
    assert re.match(rf"PeerError: rank {1 - victim} \(.*\) lost another rank \(.+\): ", said), said
    assert re.search(rf"No answer from rank {victim}, for [\d.]+ s: ", said), said


class _Arriving:
    """Engine with a pending parameter gather from a lost rank."""

    def close(self):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:545] Read error: Connection reset by peer")


def test_teardown_reports_lost_rank():
    strategy = PTDPStrategy()
    strategy._engine = _Arriving()
    strategy._run = SimpleNamespace(
        watchdog=Watchdog(rank=0, world_size=2, ranks=[0, 1], limit_s=LIMIT_S)
    )
    with pytest.raises(
        PeerError,
        match=r"rank 0 lost another rank \(the last gathered parameters\): .*\nLast action of "
        r"each rank:",
    ):
        strategy.teardown()
