"""Kinds of embeddings and the output head: split by token or along the sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.tensor_parallel.kinds.kind import Kind, ModulePlace, check_embedding, shape_text
from lightning_ptdp.tensor_parallel.tensor_shards import VocabularyRange, shard_vocabulary
from lightning_ptdp.tensor_parallel.vocabulary import (
    SequenceShardedEmbedding,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
)


@dataclass(frozen=True, kw_only=True)
class Vocabulary(Kind):
    """``nn.Embedding`` or the ``nn.Linear`` of the output head, split by token.

    The vocabulary is padded if it does not divide.
    """

    name = "vocabulary"
    takes = "nn.Embedding or nn.Linear"
    pads = True

    def fits(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Embedding | nn.Linear)

    def check(self, name: str, module: nn.Module, size: int) -> None:
        check_embedding(name, module, size)

    def placements(self, module: nn.Module, place: ModulePlace) -> dict[str, Placement]:
        words = _words(module, place)
        return {
            name: shard_vocabulary(parameter.shape, words)
            for name, parameter in module.named_parameters()
        }

    def build(
        self, module: nn.Module, local: Mapping[str, nn.Parameter], place: ModulePlace
    ) -> nn.Module:
        weight = local["weight"]
        words = _words(module, place)
        group = place.group
        if isinstance(module, nn.Embedding):
            return VocabularyParallelEmbedding(
                weight,
                vocabulary=words,
                padding_idx=module.padding_idx,
                group=group,
                sequence_parallel=place.sequence_parallel,
            )
        return VocabularyParallelHead(
            weight,
            local.get("bias"),
            vocabulary=words,
            group=group,
            sequence_parallel=place.sequence_parallel,
        )

    def describe(self, key: str, shape: Sequence[int], *, outputs_last: bool) -> tuple[str, str]:
        return shape_text((f"ceil({shape[0]}/t)", *shape[1:])), "vocabulary: split by token"


@dataclass(frozen=True, kw_only=True)
class Position(Kind):
    """``nn.Embedding`` of positions, held whole by every rank.

    Under sequence parallelism each rank looks up its own slice of the sequence.
    """

    name = "position"
    sharding = f"position: {Kind.sharding}"
    takes = "nn.Embedding"
    ties = "whole"

    def fits(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Embedding)

    def check(self, name: str, module: nn.Module, size: int) -> None:
        check_embedding(name, module, size)

    def shard(
        self, module: nn.Module, place: ModulePlace
    ) -> tuple[nn.Module, dict[str, Placement]]:
        if place.sequence_parallel:
            return super().shard(module, place)
        return (module, self.placements(module, place))

    def build(
        self, module: nn.Module, local: Mapping[str, nn.Parameter], place: ModulePlace
    ) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        return SequenceShardedEmbedding(
            local["weight"], padding_idx=module.padding_idx, group=place.group
        )


def _words(module: nn.Module, place: ModulePlace) -> VocabularyRange:
    return VocabularyRange(
        size=module.get_parameter("weight").size(0), parts=place.group.size, index=place.group.rank
    )
