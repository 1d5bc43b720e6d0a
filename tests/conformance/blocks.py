"""A small language model with tied embeddings, and the layouts that split it."""

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptdp.tensor_parallel import ParallelPlan
from tests.conformance.toys import Place, make_trainer

VOCABULARY, WIDTH, DEPTH, LENGTH = 24, 8, 4, 5
PLAN = ParallelPlan(
    blocks="h",
    tensor={"wte": "vocabulary", "h.*.up": "column", "h.*.down": "row", "head": "vocabulary"},
    before=("wte",),
    after=("norm", "head"),
)
P2 = {"pipeline_parallel_size": 2, "num_microbatches": 2, "plan": PLAN}
T2 = {"tensor_parallel_size": 2, "plan": PLAN}
LAYOUTS = {
    "p2": Place(world_size=2, layout=P2),
    "p2v2": Place(world_size=2, layout={**P2, "virtual_pipeline_size": 2}),
    "t2": Place(world_size=2, layout=T2),
    "t2p2": Place(world_size=4, layout={**P2, **T2}),
    "d2 sharded": Place(world_size=2, layout={"num_microbatches": 2, "shard": "optimizer"}),
    "d2 sharded gradients": Place(
        world_size=2, layout={"num_microbatches": 2, "shard": "gradients"}
    ),
    "d2 sharded parameters": Place(
        world_size=2, layout={"num_microbatches": 2, "shard": "parameters"}
    ),
    "d2p2 sharded": Place(world_size=4, layout={**P2, "num_microbatches": 1, "shard": "optimizer"}),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class LitBlocks(L.LightningModule):
    """An ordinary module without any code for ranks."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def loss(self, batch: Tensor) -> Tensor:
        x = self.wte(batch[:, :-1])
        for block in self.h:
            x = block(x)
        return nn.functional.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten()
        )

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-5)


def batches(place: Place, rank: int, count: int = 32) -> DataLoader:
    """Return this replica's part of batches that are the same in all layouts."""
    data = torch.randint(
        0, VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(4)
    )
    t, p = (place.layout.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "pipeline"))
    replicas = place.world_size // (t * p)
    own = [row for index, row in enumerate(data) if index % replicas == rank // t % replicas]
    return DataLoader(own, batch_size=8 // replicas)


def run_refused(rank: int, place: Place, kind: type[LitBlocks], num_batches: int = 4) -> str:
    """Return the error of a fit with validation, or an empty string."""
    trainer = make_trainer(place, use_distributed_sampler=False, max_epochs=1)
    try:
        trainer.fit(kind(), batches(place, rank, 8 * num_batches), batches(place, rank))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
