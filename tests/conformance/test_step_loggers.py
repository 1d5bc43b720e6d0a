"""Loggers and ``rank_zero_only`` in a step: rank 0 gets the calls that one process makes."""

import contextlib
import io
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from lightning_ptdp.base.nested import iterate_tensors, map_tensors
from tests.conformance.blocks import LAYOUTS, P2, T2, LitBlocks, batches
from tests.conformance.toys import ONE, Place, make_trainer
from tests.pool import WorkerFailure

pytestmark = pytest.mark.thorough

PLACES = {
    # One microbatch, so that a step runs once for a batch, as in one process.
    "p2": Place(world_size=2, layout={**P2, "num_microbatches": 1}),
    "p2v2": Place(world_size=2, layout={**P2, "num_microbatches": 1, "virtual_pipeline_size": 2}),
    "t2": LAYOUTS["t2"],
    "t2p2": Place(world_size=4, layout={**P2, **T2, "num_microbatches": 1}),
}


class Experiment:
    """An experiment with named series, as Neptune's."""

    def __init__(self, keep):
        self.add = keep

    def __getitem__(self, name):
        return SimpleNamespace(append=partial(self.add, name))

    def __setitem__(self, name, value):
        self.add(name, value)


class Kept(Logger):
    """A logger whose experiment, which rank 0 alone has, keeps calls in a list."""

    def __init__(self):
        super().__init__()
        self.calls: list[Any] = []

    @property
    def name(self):
        return "kept"

    @property
    def version(self):
        return 3

    @property
    @rank_zero_experiment
    def experiment(self):
        return Experiment(self.keep)

    def keep(self, *args, **kwargs):
        """Keep a call as a text, which has shapes for tensors, and their numbers."""
        tensors = [*iterate_tensors((args, kwargs))]
        text = repr(map_tensors((args, kwargs), lambda tensor: tensor.shape))
        self.calls.append((text, [number for one in tensors for number in one.flatten().tolist()]))

    @property
    def run(self):
        """Return an object that only rank 0 has."""
        return "run 7" if rank_zero_only.rank == 0 else None

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.keep({name: torch.tensor(value) for name, value in metrics.items()}, step=step)

    @rank_zero_only
    def log_hyperparams(self, *args, **kwargs):
        pass


class LitLogs(LitBlocks):
    """Calls its logger in all ways, before its blocks and after them."""

    @rank_zero_only
    def note(self, loss):
        self.noted = self.noted + loss.item()
        self.logger.experiment.add("noted", loss)

    def shared(self, batch, name):
        assert isinstance(self.logger, Kept) and self.logger.version == 3
        self.print("begun")
        self.logger.experiment.add(name, batch.sum(), self.logger.run)
        x = self.wte(batch[:, :-1])
        for block in self.h:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        table = np.zeros(2)
        self.logger.experiment.add(f"{name}_logits", {"values": [logits]}, table=table)
        table += 1  # after the call
        for logger in self.loggers:
            logger.log_metrics({"loss": loss.item()}, step=self.global_step)
        self.logger.experiment[f"{name}/loss"].append(loss)
        self.logger.experiment[f"{name}/count"] = len(batch)
        self.note(loss)
        return loss

    def on_fit_start(self):
        self.noted = 0.0

    def training_step(self, batch, batch_idx):
        return self.shared(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.shared(batch, "val")

    def on_train_end(self):
        if self.global_rank == 0:
            self.logger.keep("noted", torch.tensor(self.noted))


def calls_of(rank, place):
    logger = Kept()
    torch.manual_seed(1)
    trainer = make_trainer(place, use_distributed_sampler=False, max_epochs=1, logger=logger)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.fit(LitLogs(), batches(place, rank, 16), batches(place, rank, 16))
    assert trainer.loggers == [logger]
    return logger.calls, printed.getvalue().count("begun")


def calls_of_rank_zero(place, conformance):
    """Its calls and those of one process; the other ranks make none."""
    ranks = conformance.ranks(calls_of, place)
    ((expected, begun),) = conformance.expected(calls_of, ONE)
    assert sorted(count for _, count in ranks) == [*[0] * (len(ranks) - 1), begun]
    found, *others = (calls for calls, _ in ranks)
    assert len(found) == len(expected) > 20
    assert not any(others)
    return found, expected


@pytest.mark.parametrize("name", PLACES)
def test_rank_zero_gets_calls_of_one_process(name, conformance):
    found, expected = calls_of_rank_zero(PLACES[name], conformance)
    for (text, numbers), (wanted, values) in zip(found, expected, strict=True):
        assert text == wanted
        assert numbers == pytest.approx(values, rel=1e-4, abs=1e-4)


def test_only_first_replica_logs(conformance):
    calls_of_rank_zero(LAYOUTS["d2p2 sharded"], conformance)


class LitUnsendable(LitBlocks):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.logger.experiment.add(lambda: None)
        return loss


def fit_unsendable(rank, place):
    trainer = make_trainer(place, use_distributed_sampler=False, max_epochs=1, logger=Kept())
    trainer.fit(LitUnsendable(), batches(place, rank))


def test_argument_that_cannot_be_sent_is_refused(pool):
    words = r"self.logger.experiment.add\(...\) has an argument that cannot be sent from the last"
    with pytest.raises(WorkerFailure, match=words):
        pool.run(fit_unsendable, world_size=2, args=(PLACES["p2"],))
