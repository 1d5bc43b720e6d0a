"""Data module for the pretraining of a BERT."""

from __future__ import annotations

from typing import Any

from lightning_ptdp.base.option_types import check_arguments
from lightning_ptdp.data.bert_stream import BertStream, check_options
from lightning_ptdp.data.datamodule import TextDataModule
from lightning_ptdp.data.manifest import SplitName
from lightning_ptdp.data.pairs import PairObjective
from lightning_ptdp.data.stream import SampleStream
from lightning_ptdp.data.word_boundaries import SPECIAL_PIECES

__all__ = ["BertDataModule"]


class BertDataModule(TextDataModule):
    """Text as batches of masked pairs of segments, as ``BertStream`` draws them.

    The text is prepared, shuffled and resumed as in ``TextDataModule``.

    The tokenizer has the additional pieces [CLS], [SEP] and [MASK]. ``data_dir`` therefore differs
    from the folder for a GPT. Masks and pairs are drawn again in every training epoch; validation
    always uses the same ones.

    Args:
        pairs: "swap": half of the pairs are in the wrong order (sentence order, arXiv 1909.11942).
            "next": half of the second segments come from another document (next sentence, arXiv
            1810.04805).
        mask_probability: Share of the tokens to predict, chosen as whole words. 80 % of them become
            [MASK], 10 % a random token.
        kwargs: Arguments of ``TextDataModule``.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    control_symbols = SPECIAL_PIECES

    def __init__(
        self, *, pairs: PairObjective = "swap", mask_probability: float = 0.15, **kwargs: Any
    ) -> None:
        check_arguments(BertDataModule.__init__, locals())
        super().__init__(**kwargs)
        check_options(sequence_length=self.sequence_length, mask_probability=mask_probability)
        self.pairs, self.mask_probability = pairs, mask_probability

    def _stream(self, split: SplitName, max_samples: int | None = None) -> SampleStream:
        return BertStream(
            self.data_dir,
            split=split,
            sequence_length=self.sequence_length,
            max_samples=max_samples,
            pairs=self.pairs,
            mask_probability=self.mask_probability,
            seed=self.seed,
        )
