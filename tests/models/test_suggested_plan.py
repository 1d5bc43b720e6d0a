"""Plans suggested from the structure of an unknown model."""

import re
from collections import OrderedDict

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lightning_ptdp import ParallelPlan, PTDPStrategy
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.models.plans import suggested_tensor
from lightning_ptdp.strategy.checks.model import plan_of
from tests.parity import make_trainer

WIDTH = 8


class VisionBlock(nn.Module):
    """Block as in torchvision."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, WIDTH), nn.Dropout(0.0)
        )

    def forward(self, x):
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.ln_2(x))


class ResidualBlock(nn.Module):
    """Block as in open_clip."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 2)
        self.mlp = nn.Sequential(
            OrderedDict(
                [
                    ("c_fc", nn.Linear(WIDTH, 16)),
                    ("gelu", nn.GELU()),
                    ("c_proj", nn.Linear(16, WIDTH)),
                ]
            )
        )


class GatedBlock(nn.Module):
    """Block as in litgpt."""

    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "proj": nn.Linear(WIDTH, WIDTH)}
        )
        self.mlp = nn.ModuleDict(
            {
                "fc_1": nn.Linear(WIDTH, 16),
                "fc_2": nn.Linear(WIDTH, 16),
                "proj": nn.Linear(16, WIDTH),
            }
        )


def nested():
    """Return a block as in x-transformers, with a feed-forward layer of nested sequences."""
    part = nn.Module()
    part.ff = nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU()), nn.Dropout(0.0), nn.Linear(16, WIDTH)
    )
    return nn.ModuleList([nn.ModuleList([nn.LayerNorm(WIDTH)]), part, nn.Identity()])


def model(block):
    whole = nn.Module()
    whole.encoder = nn.Module()
    whole.encoder.layers = nn.Sequential(
        OrderedDict((f"layer_{index}", block()) for index in range(2))
    )
    whole.head = nn.Linear(WIDTH, 3)
    return whole


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (VisionBlock, {"self_attention": "attention", "mlp.0": "column", "mlp.3": "row"}),
        (ResidualBlock, {"attn": "attention", "mlp.c_fc": "column", "mlp.c_proj": "row"}),
        (GatedBlock, {"mlp.fc_1": "column", "mlp.fc_2": "column", "mlp.proj": "row"}),
        (nested, {"*.ff.*.0": "column", "*.ff.2": "row"}),
    ],
)
def test_layers_are_recognized_by_structure(block, expected):
    found = suggested_tensor(model(block))
    assert found == {f"encoder.layers.*.{name}": kind for name, kind in expected.items()}
    assert ParallelPlan(tensor=found).resolve(model(block))


def test_non_feed_forward_sequence_is_left_out():
    def normalized():
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Linear(16, WIDTH))

    assert suggested_tensor(model(normalized)) == {}

    def narrow():
        return nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, WIDTH))

    assert suggested_tensor(model(narrow)) == {}


class LitVision(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(VisionBlock() for _ in range(2)), nn.Linear(WIDTH, 3))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(rank, degree, plan):
    L.seed_everything(1, verbose=False)
    data = torch.utils.data.TensorDataset(
        torch.randn(16, 5, WIDTH, generator=torch.Generator().manual_seed(2))
    )
    trainer = make_trainer(
        PTDPStrategy(tensor_parallel_size=degree, plan=plan), degree, max_steps=4
    )
    trainer.fit(LitVision(), torch.utils.data.DataLoader(data, batch_size=4))
    return float(trainer.callback_metrics["loss"])


def test_suggested_plan_trains_like_single_process(pool):
    with pytest.raises(ValueError, match="suggest these lines: check them") as told:
        plan_of(LitVision(), PTDPConfig(tensor_parallel_size=2))
    found = re.search(r"ParallelPlan\(tensor=\{.*?\}\)", str(told.value), re.DOTALL)
    plan = eval(found[0], {"ParallelPlan": ParallelPlan})
    assert fit(0, 1, None) == pytest.approx(
        pool.run(fit, world_size=2, args=(2, plan))[0], rel=1e-5
    )
