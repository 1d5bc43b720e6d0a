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
        checkpoint: A checkpoint that ptdp fit wrote, in whatever layout, a Lightning checkpoint, a
            Hugging Face folder, or a folder of peft's LoRA adapters, whose base model is read from
            where they name it.
        tokenizer: Folder of the tokenizer; null: the one that the checkpoint names, or of the
            Hugging Face folder.
        tensor_parallel_size: t, ranks that share one layer's matrices; in short -t.
        pipeline_parallel_size: p, ranks that share the layers; in short -p.
        accelerator: cpu or gpu; auto: gpu where torch sees one.
        precision: Of weights and arithmetic, as the Trainer's.
        start_method: How the t * p processes are started; fork is quick, and for the CPU.
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
