"""A training run that generates text after validation."""

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ptdp import ParallelPlan, PTDPStrategy, Sampling, generate
from lightning_ptdp.generation.scoring import score
from lightning_ptdp.models import GPT, GPTConfig, gpt_plan
from tests.huggingface.runs import LENGTH, VOCABULARY, Samples, make_model
from tests.parity import make_trainer

PROMPTS = [[5, 6, 7], [1, 2, 3, 4, 5, 9, 10], [8]]
ROWS = [([5, 6, 7], 2), ([1, 2, 3, 4, 5, 9, 10], 1), ([8, 11], 1), ([4, 4, 9, 2, 30], 4)]
GREEDY = Sampling(temperature=0.0, max_new_tokens=6)
SAMPLED = Sampling(temperature=1.5, top_k=20, top_p=0.9, max_new_tokens=6)


@dataclass(frozen=True, kw_only=True)
class Writing:
    """A model to train, its layout, and the sampling of texts after every validation.

    With ``samplings=None`` no text is generated. A ``random`` training draws random numbers, which
    differ between layouts. If the writing ``differs``, the prompts of the ranks do."""

    model: str
    layout: dict[str, Any] = field(default_factory=dict, hash=False)
    world_size: int = 1
    samplings: tuple[Sampling, ...] | None = (GREEDY, SAMPLED)
    steps: int = 2
    random: bool = False
    differs: bool = False


def gpt(**options: Any) -> GPT:
    sizes = {
        "vocabulary_size": VOCABULARY,
        "sequence_length": LENGTH,
        "num_layers": 4,
        "hidden_size": 32,
        "num_heads": 4,
    }
    return GPT(GPTConfig(**sizes | options))


def mixtral() -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.MixtralConfig(
        **sizes, intermediate_size=48, num_local_experts=4, max_position_embeddings=32
    )
    return transformers.AutoModelForCausalLM.from_config(config)


class Own(nn.Module):
    """A user's model that takes token ids only."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(Mixer() for _ in range(4))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Mixer(nn.Module):
    """Adds to each token a function of the mean over the tokens up to it."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x):
        before = x.cumsum(1) / torch.arange(1, x.size(1) + 1, device=x.device)[:, None]
        return x + torch.tanh(self.linear(self.norm(before)))


class LitWriting(L.LightningModule):
    def __init__(self, writing: Writing) -> None:
        super().__init__()
        self.writing, self.model = writing, None

    def configure_model(self):
        if self.model is None:
            name = self.writing.model
            if name == "own":
                self.model = Own()
            elif name == "gpt":
                self.model = gpt(dropout=0.1 * self.writing.random)
            elif name == "rope":
                self.model = gpt(position="rope", num_kv_heads=2)
            elif name == "mixtral":
                self.model = mixtral()
            else:
                self.model = make_model(name)

    def forward(self, ids):
        return self.model(ids)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        output = self.model(batch["input_ids"])
        logits = getattr(output, "logits", output)
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), (batch["labels"] + 1).flatten() % VOCABULARY
        )

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        if self.writing.random:
            loss = loss * torch.rand(())  # must not depend on generated text
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LitGPTWriting(LitWriting):
    def configure_parallel(self) -> ParallelPlan:
        return gpt_plan(self.model.config, prefix="model")


class Writer(L.Callback):
    def __init__(self, samplings: tuple[Sampling, ...]) -> None:
        self.samplings, self.written, self.scores = samplings, [], []

    def on_validation_end(self, trainer, module):
        if module.writing.differs:
            generate(module, [[1 + trainer.global_rank]], GREEDY)
        modes = [child.training for child in module.modules()]
        self.written += [generate(module, PROMPTS, sampling) for sampling in self.samplings]
        if self.samplings:
            self.scores += score(module, ROWS, batch_size=2)
        assert modes == [child.training for child in module.modules()]


def refusal(rank: int, writing: Writing) -> str:
    """Return the error with which a training ends."""
    with pytest.raises(MisconfigurationException) as error:
        fit(rank, writing)
    return str(error.value)


def fit(rank: int, writing: Writing) -> dict[str, Any]:
    """Train; return the generated tokens, the scores and the final weights."""
    L.seed_everything(3, verbose=False)
    strategy, writer = PTDPStrategy(**writing.layout), Writer(writing.samplings or ())
    trainer = make_trainer(
        strategy,
        writing.world_size,
        max_steps=writing.steps,
        callbacks=[writer],
        num_sanity_val_steps=0,
        val_check_interval=1,
        limit_val_batches=1,
        check_val_every_n_epoch=None,
    )
    module = (LitGPTWriting if writing.model in ("gpt", "rope") else LitWriting)(writing)
    sampler = DistributedSampler(
        Samples("llama"), **strategy.distributed_sampler_kwargs, shuffle=False
    )
    loader = DataLoader(sampler.dataset, batch_size=4 // sampler.num_replicas, sampler=sampler)
    trainer.fit(module, loader, loader)
    return {
        "written": writer.written,
        "scores": writer.scores,
        "final": strategy.gather_state_dict(),
    }
