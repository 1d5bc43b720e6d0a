"""Fine-tuning a Llama at d = 2: LoRA and all weights, beside plain transformers and peft under
Lightning's DDPStrategy, in turns.

Run: python ci/benchmarks/finetune.py [--size 10|100] [--rounds 6] [--steps 2] [--only LoRA]

The same LightningModule on two gloo processes, a thread each, in both; 100 has 100 M parameters, 10
has 10 M and takes a minute."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import peft
import torch
import transformers
import transformers.models.llama.modeling_llama  # before processes are forked
from harness import QUIET, Comparison, compare, parse_options, report
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from turns import ENOUGH, Contestant, Same, TrainerLoop, alternate, on_ranks

from lightning_ptdp import PTDPStrategy

SIZES = {
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    },
    "10": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 8192,
    },
    "100": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 16384,
    },
}
BATCH, LENGTH = 4, 128


class Lit(L.LightningModule):
    """Usual LightningModule around a Llama, with adapters or without."""

    def __init__(self, size: str, adapters: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model: Any = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**SIZES[size], use_cache=False)
        )
        if adapters:
            self.model = peft.get_peft_model(
                self.model, peft.LoraConfig(r=8, target_modules="all-linear")
            )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [parameter for parameter in self.parameters() if parameter.requires_grad], lr=1e-4
        )


def contestant(size: str, adapters: bool, batch: Tensor, strategy: Callable[[], Any]) -> Contestant:
    def fit(turns: L.Callback) -> None:
        trainer = L.Trainer(
            strategy=strategy(),
            accelerator="cpu",
            devices=2,
            max_steps=ENOUGH,
            callbacks=[turns],
            **QUIET,
        )
        trainer.fit(Lit(size, adapters), torch.utils.data.DataLoader(Same(batch), batch_size=None))

    return TrainerLoop(fit)


def measure(
    rank: int, _folder: str, size: str, adapters: bool, rounds: int, steps: int
) -> dict[str, list[float]]:
    batch = torch.randint(
        0, SIZES[size]["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(rank)
    )
    engines = {
        "ours": contestant(size, adapters, batch, PTDPStrategy),
        "peer": contestant(size, adapters, batch, DDPStrategy),
    }
    return alternate(engines, rounds=rounds, steps=steps)


def row(size: str, *, adapters: bool, rounds: int, steps: int) -> Comparison:
    """Step time beside Lightning's."""
    times = on_ranks(measure, size, adapters, rounds, steps)
    what, tokens = "LoRA" if adapters else "all weights", 2 * BATCH * LENGTH
    found = compare(
        name=f"step, {size} M, {what}",
        ours=times["ours"],
        peer=times["peer"],
        peer_name="transformers, DDPStrategy",
        unit="s",
    )
    print(
        f"{what}: {tokens / found.ours:,.0f} tokens/s, and {tokens / found.peer:,.0f} under "
        "DDPStrategy",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="10")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", default="", help="'LoRA' or 'all'")
    options = parse_options(parser, rounds=1, steps=1, only="LoRA", size="tiny")
    kinds = [
        adapters
        for adapters in (True, False)
        if options.only in ("LoRA" if adapters else "all weights")
    ]
    report(
        "Fine-tuning, d = 2",
        [row(options.size, adapters=a, rounds=options.rounds, steps=options.steps) for a in kinds],
    )


if __name__ == "__main__":
    main()
