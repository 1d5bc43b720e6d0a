"""Plans of models that users bring, selected by the class of the module.

To support another model of Hugging Face, add a row to ``families.py``. Nothing here imports
transformers: classes are recognized by the module that defines them.
"""

from lightning_ptdp.models.plans.families import FAMILIES
from lightning_ptdp.models.plans.plan_registry import find_plan, plan_for, suggested_tensor

__all__ = [
    "FAMILIES",
    "find_plan",
    "plan_for",
    "suggested_tensor",
]
