"""Preference tuning (DPO) of a Llama at d = 2, beside TRL's DPOTrainer, in turns.

Run: python ci/benchmarks/dpo.py [--size 10|100] [--rounds 6] [--steps 2] [--only copy]

Both train the same pairs on two gloo processes, a thread each. The reference is a second, frozen
model (copy), or the model without its adapters (LoRA)."""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning.pytorch as L
import peft
import torch
import transformers
from datasets import Dataset
from finetune import SIZES
from harness import QUIET, Comparison, compare, parse_options, report
from torch import Tensor
from trl import DPOConfig, DPOTrainer
from turns import ENOUGH, Contestant, Same, TrainerLoop, alternate, on_ranks

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.models import AdamWConfig, LitDPO, LoraOptions, make_tiny

PAIRS, PROMPT, LENGTH = 4, 32, 128
_LORA = {"r": 8, "target_modules": "all-linear"}


def sizes(size: str) -> dict[str, Any]:
    return {"model_type": "llama", **SIZES[size]}


def draw(size: str, rank: int) -> Tensor:
    """Return the ids of chosen and rejected sequences, (2, b, s + 1), with equal prompts."""
    generator = torch.Generator().manual_seed(rank)
    shape = (2, PAIRS, LENGTH + 1)
    ids = torch.randint(1, SIZES[size]["vocab_size"], shape, generator=generator)
    ids[1, :, :PROMPT] = ids[0, :, :PROMPT]
    return ids


def ours(size: str, adapters: bool, rank: int) -> Contestant:
    batch = {}
    for name, ids in zip(("chosen", "rejected"), draw(size, rank), strict=True):
        labels = ids[:, 1:].clone()
        labels[:, : PROMPT - 1] = -100
        batch |= {f"{name}_ids": ids[:, :-1], f"{name}_labels": labels}

    def fit(turns: L.Callback) -> None:
        trainer = L.Trainer(
            strategy=PTDPStrategy(),
            accelerator="cpu",
            devices=2,
            max_steps=ENOUGH,
            callbacks=[turns],
            **QUIET,
        )
        module = LitDPO(
            config=sizes(size),
            pretrained=False,
            adapter=LoraOptions(**_LORA) if adapters else None,
            optimizer=AdamWConfig(learning_rate=1e-4),
        )
        trainer.fit(module, torch.utils.data.DataLoader(Same(batch), batch_size=None))

    return TrainerLoop(fit)


def peer(size: str, adapters: bool, rank: int, folder: str) -> Contestant:
    class Prepared(DPOTrainer):
        """TRL's trainer of pairs that have ids already."""

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

    class Turns(transformers.TrainerCallback):
        def __init__(self, turns: Any) -> None:
            self.turns = turns

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.turns.on_train_start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.turns.on_train_batch_end()

    def model() -> Any:
        torch.manual_seed(1)
        return transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**SIZES[size], use_cache=False)
        )

    rows = [
        {
            "prompt_ids": chosen[:PROMPT].tolist(),
            "chosen_ids": chosen[PROMPT:].tolist(),
            "rejected_ids": rejected[PROMPT:].tolist(),
        }
        for chosen, rejected in zip(*torch.cat([draw(size, 0), draw(size, 1)], 1), strict=True)
    ]

    def fit(turns: L.Callback) -> None:
        tokenizer = os.path.join(folder, f"tokenizer{rank}")
        make_tiny(tokenizer, hidden_size=16, intermediate_size=16)
        trainer = Prepared(
            model(),
            ref_model=None if adapters else model(),
            args=DPOConfig(
                os.path.join(folder, "trl"),
                per_device_train_batch_size=PAIRS,
                max_steps=ENOUGH,
                max_grad_norm=0.0,
                learning_rate=1e-4,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                logging_steps=50,
                disable_tqdm=True,
                max_length=None,
            ),
            processing_class=transformers.AutoTokenizer.from_pretrained(tokenizer),
            train_dataset=Dataset.from_list(rows),
            peft_config=peft.LoraConfig(**_LORA, task_type="CAUSAL_LM") if adapters else None,
            callbacks=[Turns(turns)],
        )
        assert trainer.accelerator.num_processes == 2
        trainer.train()

    return TrainerLoop(fit)


def measure(
    rank: int, folder: str, size: str, adapters: bool, rounds: int, steps: int
) -> dict[str, list[float]]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    engines = {"ours": ours(size, adapters, rank), "peer": peer(size, adapters, rank, folder)}
    return alternate(engines, rounds=rounds, steps=steps)


def row(size: str, *, adapters: bool, rounds: int, steps: int) -> Comparison:
    """Step time beside TRL's."""
    times = on_ranks(measure, size, adapters, rounds, steps)
    return compare(
        name=f"step, {size} M, {'LoRA' if adapters else 'copy'}",
        ours=times["ours"],
        peer=times["peer"],
        peer_name="TRL's DPOTrainer",
        unit="s",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="10")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", default="", help="'copy' or 'LoRA'")
    options = parse_options(parser, rounds=1, steps=1, only="copy", size="tiny")
    kinds = [
        adapters for adapters in (False, True) if options.only in ("LoRA" if adapters else "copy")
    ]
    report(
        "Preference tuning, d = 2",
        [row(options.size, adapters=a, rounds=options.rounds, steps=options.steps) for a in kinds],
    )


if __name__ == "__main__":
    main()
