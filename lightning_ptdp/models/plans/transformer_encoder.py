"""``nn.TransformerEncoder``."""

from __future__ import annotations

from typing import Any

from lightning_ptdp.models.plans.names import joined
from lightning_ptdp.tensor_parallel import Attention, Column, ParallelPlan, Row

__all__ = ["transformer_encoder_plan"]


def transformer_encoder_plan(module: Any, prefix: str = "") -> ParallelPlan:
    """The plan of an ``nn.TransformerEncoder`` of ``nn.TransformerEncoderLayer`` found under the name ``prefix``.

    What stands around it, such as an embedding and a head, is replicated; a pipeline finds it by where it is registered.
    """
    layer = joined(prefix, "layers.*")
    return ParallelPlan(
        blocks=joined(prefix, "layers"),
        tensor={f"{layer}.self_attn": Attention(), f"{layer}.linear1": Column(), f"{layer}.linear2": Row()},
        after=(joined(prefix, "norm"),) if module.norm is not None else (),
        sequence="blocks",
        # Packed sequences, which evaluation would use for padded batches, cannot cross a pipeline boundary.
        numbers={prefix: {"use_nested_tensor": False}} if prefix and hasattr(module, "use_nested_tensor") else {},
    )
