"""Plans of models that users bring: one file a model, found by the class of the module.

To support another model, add a file with a function ``(module, prefix) -> ParallelPlan`` and a line in ``registry.py``. Nothing here
imports transformers: classes are told by where they are defined.
"""

from lightning_ptdp.models.plans.bert import bert_plan
from lightning_ptdp.models.plans.declared import declared_plan
from lightning_ptdp.models.plans.gpt2 import gpt2_plan
from lightning_ptdp.models.plans.registry import find_plan, plan_for
from lightning_ptdp.models.plans.transformer_encoder import transformer_encoder_plan

__all__ = ["bert_plan", "declared_plan", "find_plan", "gpt2_plan", "plan_for", "transformer_encoder_plan"]
