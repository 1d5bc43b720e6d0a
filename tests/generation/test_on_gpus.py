"""Text generation on a fake GPU and under NCCL's ordering rules.

The host waits once per token. The order of operations on all ranks does not deadlock.
"""

from collections import Counter

import lightning.pytorch as pl
import pytest
import torch

from lightning_ptdp import Sampling, generate
from lightning_ptdp.strategy import PTDPStrategy
from tests.fake_cuda import Waits, fake_cuda
from tests.generation.sampling_run import LitGPTWriting, LitWriting, Writing, fit
from tests.huggingface.runs import LAYOUTS
from tests.nccl_calls import operations_of
from tests.queued import HOST
from tests.schedule.streams import stuck_operations

pytestmark = pytest.mark.thorough

TOKENS = 6


class Writes(pl.Callback):
    """Generates a short and a longer text, each with a separate batch of recorded waits.

    The first two tokens fill the caches. The difference of both batches excludes their waits."""

    def __init__(self, waits: Waits) -> None:
        self._batches = waits.batches

    def on_predict_start(self, trainer, pl_module):
        for count in (2, TOKENS + 2):
            self._batches.append([])
            # transformers reads the values of a mask, which is one more wait with padding.
            short = [8] if isinstance(pl_module, LitGPTWriting) else [8, 9, 10]
            generate(pl_module, [[5, 6, 7], short], Sampling(max_new_tokens=count))
        self._batches.append([])


def waits_of(rank, size, model, layout):
    """Return the host's waits that more generated tokens add."""
    torch.manual_seed(0)
    with fake_cuda(rank) as waits:
        trainer = pl.Trainer(
            strategy=PTDPStrategy(process_group_backend="gloo", **layout),
            accelerator="gpu",
            devices=size,
            logger=False,
            enable_progress_bar=False,
            callbacks=[Writes(waits)],
        )
        module = (LitGPTWriting if model == "gpt" else LitWriting)(Writing(model=model))
        trainer.predict(
            module,
            torch.utils.data.DataLoader([torch.zeros(3, dtype=torch.int64)]),
            return_predictions=False,
        )
    few, many = (Counter((wait.what, wait.place) for wait in batch) for batch in waits.batches[1:3])
    return many - few


@pytest.mark.parametrize(("model", "layout"), [("gpt", "t2"), ("llama", "p2"), ("gpt", None)])
def test_host_waits_once_per_token(model, layout, pool):
    size, degrees = LAYOUTS[layout] if layout else (1, {})
    for waits in pool.run(waits_of, world_size=size, args=(size, model, degrees)):
        assert waits == {("tolist", "generation/write.py _write"): TOKENS}


def calls_of(rank, writing):
    fit(rank, writing)
    return list(HOST.calls)


def test_generation_does_not_deadlock_under_nccl_rules(pool):
    size, layout = LAYOUTS["t2p2"]
    ranks = pool.run(
        calls_of,
        world_size=size,
        args=(Writing(model="gpt", layout=layout, world_size=size, steps=1),),
        backend="queued",
    )
    programs = [operations_of(calls) for calls in ranks]
    for one_queue in (False, True):
        assert stuck_operations(programs, one_queue=one_queue) == [None] * size
