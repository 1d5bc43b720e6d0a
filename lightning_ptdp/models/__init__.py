"""Models as plain single-device PyTorch, their parallel plans, and their LightningModules.

GPT and BERT are in ``gpt.py`` and ``bert.py``, their LightningModules in ``lit_gpt.py`` and
``lit_bert.py``. ``lit_huggingface.py`` wraps the language models of transformers. The package
``plans`` describes how models that users bring are split.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_ptdp.models.adamw_variants import HalfStateAdamW, MuonWithAdamW
from lightning_ptdp.models.adapters import LoraOptions
from lightning_ptdp.models.bert import Bert, BertOutput, bert_plan
from lightning_ptdp.models.gpt import GPT, gpt_plan
from lightning_ptdp.models.model_config import BertConfig, GPTConfig
from lightning_ptdp.models.optimizer_setup import AdamWConfig
from lightning_ptdp.models.size import (
    active_parameters,
    bert_flops_per_sample,
    flops_per_sample,
    num_parameters,
)
from lightning_ptdp.models.tiny import make_tiny

if TYPE_CHECKING:
    from lightning_ptdp.models.lit_bert import LitBert
    from lightning_ptdp.models.lit_dpo import LitDPO
    from lightning_ptdp.models.lit_gpt import LitGPT
    from lightning_ptdp.models.lit_huggingface import LitCausalLM, LitImageTextToText, LitMaskedLM

__all__ = [
    "GPT",
    "AdamWConfig",
    "HalfStateAdamW",
    "MuonWithAdamW",
    "Bert",
    "BertConfig",
    "BertOutput",
    "GPTConfig",
    "LitBert",
    "LitCausalLM",
    "LitDPO",
    "LitGPT",
    "LitImageTextToText",
    "LitMaskedLM",
    "LoraOptions",
    "active_parameters",
    "bert_flops_per_sample",
    "bert_plan",
    "flops_per_sample",
    "gpt_plan",
    "make_tiny",
    "num_parameters",
]

_LIT = {
    "LitBert": "lit_bert",
    "LitCausalLM": "lit_huggingface",
    "LitDPO": "lit_dpo",
    "LitGPT": "lit_gpt",
    "LitImageTextToText": "lit_huggingface",
    "LitMaskedLM": "lit_huggingface",
}


def __getattr__(name: str) -> Any:
    """Import the modules that need Lightning on first use."""
    if name in _LIT:
        return getattr(import_module(f"{__name__}.{_LIT[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
