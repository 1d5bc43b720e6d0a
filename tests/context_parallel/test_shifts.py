"""Refusal of steps that shift labels along the sequence under context parallelism, because pairs at
the ends of chunks would be lost."""

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F

from lightning_ptdp.attention import ContextParallelError
from lightning_ptdp.context_parallel.slice_functions import SliceFunctions
from lightning_ptdp.models import GPT, GPTConfig
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.world.mesh import Group
from tests.parity import make_trainer

CONFIG = GPTConfig.gpt2(
    vocabulary_size=16, sequence_length=8, num_layers=2, hidden_size=16, num_heads=2
)

SHIFTS = {
    "brackets": lambda logits, ids: (logits[:, :-1], ids[:, 1:]),
    "ellipsis": lambda logits, ids: (logits[..., :-1, :], ids[..., 1:]),
    "narrow": lambda logits, ids: (
        logits.narrow(1, 0, ids.size(1) - 1),
        torch.narrow(ids, 1, 1, ids.size(1) - 1),
    ),
    "labels padded": lambda logits, ids: (logits, F.pad(ids[:, 1:], (0, 1), value=-100)),
    "roll": lambda logits, ids: (logits, ids.roll(-1, 1)),
}


class LitShift(L.LightningModule):
    def __init__(self, shift: str) -> None:
        super().__init__()
        self.shift, self.model = shift, GPT(CONFIG)

    def training_step(self, batch, batch_idx):
        ids = batch["input_ids"]
        logits, labels = SHIFTS[self.shift](self.model(ids), ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(rank, shift, size):
    L.seed_everything(1, verbose=False)
    rows = [
        {"input_ids": row}
        for row in torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(1))
    ]
    trainer = make_trainer(PTDPStrategy(context_parallel_size=size), size, max_steps=2)
    try:
        trainer.fit(LitShift(shift), torch.utils.data.DataLoader(rows, batch_size=2))
    except ContextParallelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shift", SHIFTS)
def test_step_with_shifted_labels_is_refused(shift, pool):
    for text in pool.run(fit, world_size=2, args=(shift, 2)):
        assert (
            "has 4 of 8 tokens, in two chunks. Pairs of neighbours at the ends of the chunks would be "
            "lost" in text
        )
    assert pool.run(fit, world_size=1, args=(shift, 1)) == [""]


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), slice(None)),
        (slice(None), slice(0, 8)),
        (slice(None), 0),
        (slice(None), slice(0, 4)),
        (Ellipsis, slice(0, 3)),
        (slice(None), None),
        (slice(None), torch.arange(7)),
        slice(1, None),
    ],
    ids=str,
)
def test_other_indices_are_accepted(index):
    group = Group(handle=None, ranks=(0, 1), rank=0)
    functions = SliceFunctions(attention=None, group=group, length=16)
    functions.check_index(torch.zeros(3, 8, 4), index)
    functions.check_index(torch.zeros(3, 9, 4), (slice(None), slice(1, None)))
    functions.check_index(torch.zeros(3, 8), (slice(None), slice(1, None)))
