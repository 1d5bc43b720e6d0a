"""Models whose blocks do not form a chain are refused before launch: U-Net, N-BEATS, temporal
fusion transformer, blocks that store losses elsewhere."""

from itertools import pairwise

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_ptdp.pipeline.containers import ModelParts
from lightning_ptdp.pipeline.dry_run import Rehearsal
from tests.conformance.toys import P2, Place, make_trainer


class LitSeries(L.LightningModule):
    """Base class of the models. Its training step must not run."""

    def training_step(self, batch, batch_idx):
        raise AssertionError("it was not refused before launch")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def convolutions(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
    )


class UNet(LitSeries):
    """Each decoder block takes the output of an encoder block."""

    example_input_array = torch.zeros(1, 3, 16, 16)

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(convolutions(*sizes) for sizes in pairwise((3, 8, 16, 32)))
        self.middle = convolutions(32, 32)
        self.up = nn.ModuleList(convolutions(*sizes) for sizes in ((64, 32), (48, 16), (24, 8)))
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.head(x)


class Stack(nn.Module):
    """A block of N-BEATS, which returns a backcast and a forecast."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.backcast, self.forecast = nn.Linear(16, 12), nn.Linear(16, 4)

    def forward(self, x):
        hidden = self.body(x)
        return self.backcast(hidden), self.forecast(hidden)


class NBeats(LitSeries):
    """Computes the residual between the blocks."""

    example_input_array = torch.zeros(1, 12)

    def __init__(self):
        super().__init__()
        self.stacks = nn.ModuleList(Stack() for _ in range(4))

    def forward(self, x):
        total = torch.zeros(len(x), 4)
        for stack in self.stacks:
            backcast, forecast = stack(x)
            x = x - backcast
            total = total + forecast
        return total


class Gated(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second, self.gate = (
            nn.Linear(inputs, hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, 2 * hidden),
        )
        self.skip, self.norm = nn.Linear(inputs, hidden), nn.LayerNorm(hidden)

    def forward(self, x):
        return self.norm(self.skip(x) + F.glu(self.gate(self.second(F.elu(self.first(x))))))


class Heads(nn.Module):
    """Attention whose heads share their values. It has the only module lists of the model."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.queries = nn.ModuleList(nn.Linear(hidden, hidden // 2) for _ in range(2))
        self.keys = nn.ModuleList(nn.Linear(hidden, hidden // 2) for _ in range(2))
        self.values, self.out = nn.Linear(hidden, hidden // 2), nn.Linear(hidden // 2, hidden)

    def forward(self, x):
        pairs = zip(self.queries, self.keys, strict=True)
        found = [F.scaled_dot_product_attention(q(x), k(x), self.values(x)) for q, k in pairs]
        return self.out(torch.stack(found).mean(0))


class FusionTransformer(LitSeries):
    """Many small modules, none of them repeated. It has no example input."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.select = nn.ModuleDict({name: Gated(1, hidden) for name in "abc"})
        self.past, self.future = (
            nn.LSTM(hidden, hidden, batch_first=True),
            nn.LSTM(hidden, hidden, batch_first=True),
        )
        self.enrich, self.attention, self.behind = (
            Gated(hidden, hidden),
            Heads(hidden),
            Gated(hidden, hidden),
        )
        self.head = nn.Linear(hidden, 3)


class AloneNBeats(NBeats):
    """N-BEATS without an example input. Its first layer determines the input's size."""

    example_input_array = None


class AloneUNet(LitSeries):
    """U-Net without an example input, in a module without a forward."""

    def __init__(self):
        super().__init__()
        self.net = UNet()
        self.net.example_input_array = None


class ChoosingNBeats(NBeats):
    """Its forward depends on values."""

    def forward(self, x):
        return super().forward(2 * x if x.any() else x)


class Scored(nn.Module):
    """Block that adds a loss to a list outside of itself."""

    def __init__(self, losses):
        super().__init__()
        self.up, self.keep = nn.Linear(4, 4), losses.append

    def forward(self, x):
        x = self.up(x)
        self.keep(x.square().mean())
        return x


class LitScored(LitSeries):
    """The losses are in no attribute of a block."""

    def __init__(self):
        super().__init__()
        self.losses = []
        self.h = nn.ModuleList(Scored(self.losses) for _ in range(4))

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return x


class LearnedNumber(nn.Module):
    """Block with a learned number, whose function the graph keeps."""

    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(4, 4), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gate.sigmoid() * self.up(x)


def test_learned_number_in_a_block_is_no_stored_loss():
    Rehearsal(
        model=nn.Sequential(*(LearnedNumber() for _ in range(4))),
        parts=ModelParts(blocks=("",)),
        ranges=((0, 2), (2, 4)),
        collects=False,
        pipeline_parallel_size=2,
    ).on_examples()


STORED = (
    "a block stores a number with a gradient outside of itself",
    "ParallelPlan(collects=True)",
    "use pipeline_parallel_size=1",
)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (LitScored, STORED),
        (
            UNet,
            [
                "pipeline_parallel_size=2",
                "block 'up.0'",
                "'down' and 'up'",
                "skip connections",
                "use pipeline_parallel_size=1",
            ],
        ),
        (
            NBeats,
            [
                "pipeline_parallel_size=2",
                "before block 'stacks.2'",
                "into the blocks",
                "use pipeline_parallel_size=1",
            ],
        ),
        (ChoosingNBeats, ["before block 'stacks.2'", "use pipeline_parallel_size=1"]),
        (AloneNBeats, ["before block 'stacks.2'", "use pipeline_parallel_size=1"]),
        (AloneUNet, ["block 'net.up.0'", "use pipeline_parallel_size=1"]),
        (
            FusionTransformer,
            [
                "no repeated container",
                "'attention.queries'",
                "or use pipeline_parallel_size=1",
            ],
        ),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_model_without_block_chain_is_refused_before_launch(module, words):
    trainer = make_trainer(Place(world_size=2, layout={**P2, "start_method": "fork"}))
    with pytest.raises(ValueError) as error:
        trainer.fit(module(), DataLoader([0] * 4))
    message = str(error.value)
    assert [word for word in words if word.lower() not in message.lower()] == []
    assert message.count(". ") <= 2
