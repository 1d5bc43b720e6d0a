"""Modules whose forward is called directly, so that torch skips their hooks."""

import inspect
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_ptdp.tensor_parallel import ParallelPlan, Region
from tests.letters import SP, C, M, P, R, T, V, Z
from tests.parity import Training

VOCABULARY, WIDTH, LENGTH = 24, 8, 8


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down.forward(F.silu(self.gate.forward(x)) * self.up.forward(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x):
        return x + self.mlp.forward(self.norm.forward(x))


class LitDirect(L.LightningModule):
    """Calls the forwards of its ends, of its blocks and of their regions directly."""

    def __init__(self):
        super().__init__()
        self.wte, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, False)
        self.h = nn.ModuleList(Block() for _ in range(4))

    def configure_parallel(self):
        return ParallelPlan(
            blocks="h",
            tensor={
                "wte": "vocabulary",
                "h.*.mlp": Region(),
                "h.*.mlp.up": "column",
                "h.*.mlp.gate": "column",
                "h.*.mlp.down": "row",
                "head": "vocabulary",
            },
            before=("wte",),
            after=("head",),
        )

    def training_step(self, batch, batch_idx):
        x = self.wte.forward(batch)
        for block in self.h:
            x = block.forward(x)
        return F.cross_entropy(self.head.forward(x).flatten(0, 1), batch.flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class LitDirectLlama(L.LightningModule):
    """Calls the forward of a Hugging Face model, which computes the loss."""

    def __init__(self):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        )

    def training_step(self, batch, batch_idx):
        # Hugging Face's generation reads the names of the arguments.
        assert "position_ids" in inspect.signature(self.model.forward).parameters
        return self.model.forward(input_ids=batch, labels=batch).loss

    configure_optimizers = LitDirect.configure_optimizers


class LitDirectStack(LitDirectLlama):
    """Calls the forward of the stack of blocks inside of the model."""

    def training_step(self, batch, batch_idx):
        hidden = self.model.model.forward(input_ids=batch).last_hidden_state
        return F.cross_entropy(self.model.lm_head.forward(hidden).flatten(0, 1), batch.flatten())


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    kind: type[L.LightningModule] = LitDirect
    layout: dict[str, Any] = field(default_factory=dict)

    always_clips = False

    def make_module(self):
        return self.kind()

    def make_data(self):
        shape = (self.steps * self.global_batch, LENGTH)
        return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(2))


LAYOUTS = {
    "m2 recomputed": (1, {M: 2, R: "full"}),
    "t2": (2, {T: 2}),
    "t2 sp": (2, {T: 2, SP: True}),
    "p2": (2, {P: 2, M: 2}),
    "p2 v2 zero 1": (4, {P: 2, V: 2, M: 2, Z: "optimizer"}),
    "d2 zero 3": (2, {Z: "parameters"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_direct_calls_match_single_process(name, parity):
    parity.check(Run(), LAYOUTS[name])


@pytest.mark.parametrize("kind", [LitDirectLlama, LitDirectStack])
@pytest.mark.parametrize("layout", [{C: 2}, {P: 2, M: 2}], ids=["c2", "p2"])
def test_direct_calls_of_hugging_face_model_match(kind, layout, parity):
    pytest.importorskip("transformers")
    parity.check(Run(kind=kind), (2, layout))
