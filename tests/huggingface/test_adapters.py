"""Adapters around the projections of a Hugging Face model, under its own plan."""

import pytest
from torch import nn
from torch.utils.data import DataLoader

from lightning_ptdp.strategy import PTDPStrategy
from tests.huggingface.runs import LitHuggingFace, Run, Samples
from tests.parity import make_trainer

pytest.importorskip("transformers")


class Adapter(nn.Module):
    """A projection with a low-rank addition."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = (
            base,
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Adapted(LitHuggingFace):
    def configure_model(self):
        if self.model is None:
            super().configure_model()
            for layer in self.model.model.layers:
                layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)


def _notes(rank, module):
    strategy = PTDPStrategy(tensor_parallel_size=2)
    trainer = make_trainer(strategy, 2, max_steps=1, limit_val_batches=0)
    trainer.fit(module(Run(model="llama")), DataLoader(Samples("llama"), batch_size=4))
    return [note for note in strategy.summary().notes if "replicated" in note]


def test_replicated_adapters_are_noted_in_summary(pool):
    for notes in pool.run(_notes, world_size=2, args=(Adapted,)):
        assert len(notes) == 1
        assert "self_attn" in notes[0]
        assert "model.model.layers.*." in notes[0]
        assert "tensor_parallel_size=2 leaves" in notes[0]
    assert pool.run(_notes, world_size=2, args=(LitHuggingFace,)) == [[], []]
