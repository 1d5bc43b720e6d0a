"""Steps that change their batch: each stage and microbatch starts from what the loader gave."""

from dataclasses import dataclass

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.letters import M, P, R, S, V
from tests.parity import Training

CLASSES, WIDTH = 12, 8


class LitChanges(L.LightningModule):
    """Takes its labels out of the batch."""

    def __init__(self):
        super().__init__()
        self.inputs = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch, batch_idx):
        labels = batch.pop("labels")
        return self.loss(batch["ids"], labels)

    def loss(self, ids, labels):
        x = self.inputs(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class LitReplaces(LitChanges):
    def training_step(self, batch, batch_idx):
        batch["ids"] = (batch["ids"] + 1) % CLASSES
        batch["more"] = batch["labels"]
        return self.loss(batch["ids"], batch["labels"])


class LitWrites(LitChanges):
    """Writes inputs that a graph keeps, and labels."""

    def training_step(self, batch, batch_idx):
        ids, labels = batch["ids"].add_(1).remainder_(CLASSES), batch["labels"]
        labels[labels == 3] = -100
        return self.loss(ids, labels.sub_(1).remainder_(CLASSES))


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    kind: type[LitChanges] = LitChanges

    always_clips = False

    def make_module(self):
        return self.kind()

    def make_data(self):
        ids = torch.randint(CLASSES, (64, 2), generator=torch.Generator().manual_seed(2))
        return [{"ids": row[0], "labels": row[1]} for row in ids]


LAYOUTS = {
    "m2": (1, {M: 2}),
    "p2": (2, {P: 2, M: 2}),
    "p2 v2": (2, {P: 2, V: 2, M: 2}),
    "p2 zb": (2, {P: 2, M: 4, S: "zb_h1", R: "none"}),
}


@pytest.mark.parametrize("kind", [LitChanges, LitReplaces, LitWrites])
@pytest.mark.parametrize("name", LAYOUTS)
def test_changed_batches_match_single_process(name, kind, parity):
    parity.check(Run(kind=kind), LAYOUTS[name])
