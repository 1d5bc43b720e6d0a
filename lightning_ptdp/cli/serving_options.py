"""Options that ``ptdp generate`` and ``ptdp chat`` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_ptdp.base.option_types import Size, check_types

__all__ = ["ServingOptions"]


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Model, layout and device for text generation.

    Args:
        checkpoint: A checkpoint of ptdp fit in any layout, a Lightning checkpoint, a Hugging Face
            folder, or a folder of peft's LoRA adapters. The base model of adapters is read from the
            place that they name.
        tokenizer: Folder of the tokenizer; null: that of the checkpoint or of the Hugging Face
            folder.
        tensor_parallel_size: t, ranks that share one layer's matrices; short form -t.
        pipeline_parallel_size: p, ranks that share the layers; short form -p.
        accelerator: cpu or gpu; auto: gpu if torch sees one.
        precision: Precision of weights and arithmetic, as for the Trainer.
        start_method: How the t * p processes are started; fork is fast, and only for CPUs.
    """

    checkpoint: str
    tokenizer: str | None = None
    tensor_parallel_size: Size = 1
    pipeline_parallel_size: Size = 1
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    precision: str = "32-true"
    start_method: Literal["popen", "fork"] = "popen"

    def __post_init__(self) -> None:
        check_types(self)
