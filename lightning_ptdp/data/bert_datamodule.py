"""Text for the pretraining of a BERT."""

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
    """Any text as batches of masked pairs of segments (see ``BertStream``), prepared, shuffled and
    resumed as ``TextDataModule`` does.

    The tokenizer has the pieces [CLS], [SEP] and [MASK], so that ``data_dir`` is another one than a
    GPT's. Masks and pairs are drawn anew in every epoch, and are always the same for validation.

    Args:
        pairs: "swap", half of the pairs in the wrong order (sentence order, arXiv 1909.11942); or
            "next", half of the second segments from another document (next sentence, arXiv
            1810.04805).
        mask_probability: Share of the tokens that are predicted, in whole words; of them 80 %
            become [MASK], 10 % a random token.
        kwargs: Those of ``TextDataModule``.

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
