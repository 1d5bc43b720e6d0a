"""Plans of ``nn.TransformerEncoder`` and ``nn.Transformer``."""

from __future__ import annotations

from torch import nn

from lightning_ptdp.models.plans.module_names import joined
from lightning_ptdp.tensor_parallel import AttentionHeads, Column, Kind, ParallelPlan, Row

__all__ = ["transformer_encoder_plan", "transformer_plan"]


def transformer_encoder_plan(module: nn.Module, prefix: str = "") -> ParallelPlan:
    """Return the plan of an ``nn.TransformerEncoder`` with the name ``prefix``.

    Its layers are ``nn.TransformerEncoderLayer``. Modules around it, such as an embedding and a
    head, are replicated. A pipeline orders them by their registration.
    """
    return ParallelPlan(
        blocks=joined(prefix, "layers"),
        tensor=_layers(prefix),
        after=(joined(prefix, "norm"),) if module.norm is not None else (),
        sequence="blocks",
    )


def transformer_plan(module: nn.Module, prefix: str = "") -> ParallelPlan:
    """Return the plan of an ``nn.Transformer`` with the name ``prefix``.

    Encoder and decoder are torch's own.
    """
    encoder, decoder = joined(prefix, "encoder"), joined(prefix, "decoder")
    return ParallelPlan(
        blocks=(f"{encoder}.layers", f"{decoder}.layers"),
        tensor={
            **_layers(encoder),
            **_layers(decoder),
            f"{decoder}.layers.*.multihead_attn": AttentionHeads(),
        },
        between=(f"{encoder}.norm",) if module.encoder.norm is not None else (),
        after=(f"{decoder}.norm",) if module.decoder.norm is not None else (),
        sequence=None,
    )


def _layers(prefix: str) -> dict[str, Kind]:
    layer = joined(prefix, "layers.*")
    return {
        f"{layer}.self_attn": AttentionHeads(),
        f"{layer}.linear1": Column(),
        f"{layer}.linear2": Row(),
    }
