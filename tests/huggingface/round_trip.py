"""Round trip of a Hugging Face folder: train in a layout, export, and continue in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_ptdp.models import AdamWConfig, LitCausalLM
from tests.folders import read_huggingface
from tests.huggingface.architectures import build
from tests.huggingface.runs import LAYOUTS, Run
from tests.parity import fit
from tests.pool import Pool

__all__ = ["CIRCLE", "OPTIMIZER", "causal", "differences_around"]

CIRCLE = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma3",
    "mistral",
    "phi3",
    "olmo2",
    "granite",
    "starcoder2",
    "gpt_neox",
    "gpt2",
)
# The true gradient of key biases is zero. An epsilon of 1e-8 turns its rounding errors into steps:
# 3e-4 of the bias (float64: 1e-12).
OPTIMIZER = AdamWConfig(learning_rate=5e-3, eps=1e-3, weight_decay=0.01)


def causal(run: Run) -> LitCausalLM:
    """Return the module of a run with the weights of ``run.pretrained``."""
    assert run.pretrained is not None
    return LitCausalLM(run.pretrained, optimizer=OPTIMIZER, **dict(run.options))


def val_loss(result: dict[str, Any]) -> float:
    """Return the loss of the last validation."""
    loss: float = result["logged"][-1]["val_loss"]
    return loss


def differences_around(
    pool: Pool, name: str, folder: Path, *, layout: str = "t2p2v2", tolerance: float = 1e-5
) -> list[str]:
    """Return the differences between training in ``layout`` and training in one process.

    A model trains two steps from a folder, in ``layout`` and in one process, and is exported to
    another folder. One process then trains two more steps from each export. Losses, exported
    folders and final weights are compared. transformers must load the folder from ``layout``
    without missing or unexpected keys."""
    import transformers

    torch.manual_seed(11)
    build(name).float().save_pretrained(folder / "begun", max_shard_size="20KB")
    world_size, degrees = LAYOUTS[layout]
    begin = Run(model="labelled", module=causal, pretrained=str(folder / "begun"), steps=2)
    found: dict[str, Any] = {}
    for who, run in (
        ("many", replace(begin, layout=degrees, world_size=world_size)),
        ("one", begin),
    ):
        out = str(folder / who)
        first = pool.run(fit, world_size=run.world_size, args=(replace(run, export=out),))[0]
        on = pool.run(fit, world_size=1, args=(replace(begin, pretrained=out),))[0]
        found[who] = (
            [*first["losses"], val_loss(first), *on["losses"], val_loss(on)],
            on["final"],
        )
    unlike = [
        f"loss {index}: {ours} and {theirs}"
        for index, (ours, theirs) in enumerate(zip(found["many"][0], found["one"][0], strict=True))
        if abs(ours - theirs) > tolerance * abs(theirs)
    ]
    written, expected = read_huggingface(folder / "many"), read_huggingface(folder / "one")
    for what, ours, theirs in (
        ("folder", written, expected),
        ("end", found["many"][1], found["one"][1]),
    ):
        unlike += (
            [f"{what}: names {sorted(ours.keys() ^ theirs.keys())}"]
            if ours.keys() != theirs.keys()
            else []
        )
        for key in ours.keys() & theirs.keys():
            difference = float(
                (ours[key] - theirs[key]).norm() / theirs[key].norm().clamp(min=1e-3)
            )
            unlike += [f"{what}: {key} is {difference:.1e} away"] if difference > tolerance else []
    _, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "many", output_loading_info=True
    )
    return unlike + [f"{key}: {value}" for key, value in said.items() if value]
