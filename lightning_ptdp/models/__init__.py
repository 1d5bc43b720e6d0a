"""Models as plain single-device PyTorch, a parallel plan beside each, and the LightningModule around them."""

from lightning_ptdp.models.generate import generate
from lightning_ptdp.models.gpt import GPT
from lightning_ptdp.models.gpt_config import GPTConfig
from lightning_ptdp.models.gpt_plan import check_tensor_parallel, gpt_plan
from lightning_ptdp.models.gpt_size import flops_per_sample, num_parameters
from lightning_ptdp.models.lit_gpt import LitGPT
from lightning_ptdp.models.optimization import AdamWConfig

__all__ = [
    "AdamWConfig",
    "GPT",
    "GPTConfig",
    "LitGPT",
    "check_tensor_parallel",
    "flops_per_sample",
    "generate",
    "gpt_plan",
    "num_parameters",
]
