"""Plans of models that users bring, selected by the class of the module.

To support another model of Hugging Face, add a row to ``families.py``. Nothing here imports
transformers: classes are recognized by the module that defines them.
"""

from lightning_ptdp.models.plans.declared import declared_plan
from lightning_ptdp.models.plans.encoder_decoder import encoder_decoder_plan
from lightning_ptdp.models.plans.families import FAMILIES, Family, family_plan
from lightning_ptdp.models.plans.plan_registry import (
    find_plan,
    plan_for,
    suggested_tensor,
    transformer_encoder_plan,
    transformer_plan,
)

__all__ = [
    "FAMILIES",
    "Family",
    "declared_plan",
    "encoder_decoder_plan",
    "family_plan",
    "find_plan",
    "plan_for",
    "suggested_tensor",
    "transformer_encoder_plan",
    "transformer_plan",
]
