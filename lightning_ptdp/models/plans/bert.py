"""BERT of Hugging Face, bare or with its pretraining heads: masked language model, next sentence, or both."""

from __future__ import annotations

from typing import Any

from lightning_ptdp.models.plans.names import joined
from lightning_ptdp.tensor_parallel import Alias, Column, Kind, ParallelPlan, Region, Row, Vocabulary

__all__ = ["bert_plan"]


def bert_plan(module: Any, prefix: str = "") -> ParallelPlan:
    """The plan of a ``BertModel``, or of a model that has one as ``bert`` and heads beside it.

    The decoder's weight is the word embedding's, and its bias has a second name, ``predictions.bias``.
    """
    bare = getattr(module, "bert", None) is None
    base, bert = (prefix, module) if bare else (joined(prefix, "bert"), module.bert)
    heads = bert.config.num_attention_heads
    block, embeddings = joined(base, "encoder.layer.*"), joined(base, "embeddings")
    projections = {f"{block}.attention.self.{name}": Column(heads=heads) for name in ("query", "key", "value")}
    tensor: dict[str, Kind] = {
        f"{embeddings}.word_embeddings": Vocabulary(),
        f"{block}.attention.self": Region(),
        **projections,
        f"{block}.attention.output.dense": Row(),
        f"{block}.intermediate.dense": Column(),
        f"{block}.output.dense": Row(),
    }
    after = [joined(base, "pooler")] if bert.pooler is not None else []
    if not bare:
        after += [joined(prefix, name) for name, child in module.named_children() if name != "bert" and list(child.parameters())]
        for name, child in module.named_modules():
            if type(child).__name__ == "BertLMPredictionHead":
                tensor[joined(prefix, name)] = Alias()
                tensor[joined(prefix, name, "decoder")] = Vocabulary()
    return ParallelPlan(
        blocks=joined(base, "encoder.layer"), tensor=tensor, before=(embeddings,), after=tuple(after), sequence="blocks"
    )
