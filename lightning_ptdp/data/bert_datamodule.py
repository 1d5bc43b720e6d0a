"""Samples and data module for the pretraining of a BERT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_ptdp.base.option_types import (
    Count,
    Size,
    check_arguments,
    check_fraction,
    check_integer,
)
from lightning_ptdp.checkpoint.files import sha256
from lightning_ptdp.data.data_error import StoreError
from lightning_ptdp.data.datamodule import TextDataModule
from lightning_ptdp.data.manifest import Manifest, SplitName
from lightning_ptdp.data.pairs import (
    LEAST_TOKENS,
    SPECIAL_PIECES,
    Draws,
    PairObjective,
    WordVocabulary,
    choose_words,
    draw_pair,
    find_windows,
    number_to_predict,
    replace_tokens,
)
from lightning_ptdp.data.stream import IGNORE_INDEX, PADDING, Batch, SampleStream
from lightning_ptdp.data.tokenizer import Tokenizer


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
        self.pairs = pairs
        self.mask_probability = mask_probability

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


# ---- Random access to samples for a BERT: pairs of segments with masked words --------------------
#
# A sample is a pair of segments from a window of one document, with some of its words masked.
#
# ::
#
#     input_ids        [CLS] a a  a  a [SEP] b  b b [SEP] [PAD] [PAD]
#     token_type_ids     0   0 0  0  0   0   1  1 1   1     0     0
#     attention_mask     1   1 1  1  1   1   1  1 1   1     0     0
#     labels             .   . 17 9  .   .   . 52 .   .     .     .      (. is -100)
#     masked_positions   2 3 7 0                                         (0 fills up: [CLS] has no label)
#     next_sentence_label  0
#
# All random choices of a sample depend on (seed, epoch, sample) only. Masks and pairs therefore
# differ between epochs, and are the same on every rank, after every resume, and with any number of
# workers.


_SPECIAL = 3  # [CLS] and two [SEP]
_FACTS = 3  # Per row: end of the first segment, end of the second, sentence label.
_TRIES = 16


class BertStream(SampleStream):
    """Random access to the samples of one split.

    Args:
        folder: Folder that ``prepare`` made, with the pieces [CLS], [SEP] and [MASK].
        split: ``"train"`` or ``"validation"``.
        sequence_length: s, tokens of a sample, special ones included.
        max_samples: Use only this many windows, from the first on.
        pairs: ``"swap"`` (sentence order: the two segments may be exchanged) or ``"next"`` (next
            sentence: the second segment may come from another document).
        mask_probability: Share of the tokens to predict.
        seed: Seed of all random choices.

    Raises:
        StoreError: The folder is not prepared data, the split holds no window, or ``pairs="next"``
            finds only one document.
        TokenizerError: The tokenizer lacks the pieces.
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        split: SplitName = "train",
        sequence_length: Size,
        max_samples: Size | None = None,
        pairs: PairObjective = "swap",
        mask_probability: float = 0.15,
        seed: Count = 0,
    ) -> None:
        check_arguments(BertStream.__init__, locals())
        check_options(sequence_length=sequence_length, mask_probability=mask_probability)
        self.pairs = pairs
        self.mask_probability = mask_probability
        self.seed = seed
        self._room = sequence_length - _SPECIAL
        self.num_predictions = number_to_predict(self._room, mask_probability)
        manifest = Manifest.read(folder)
        self._vocabulary = WordVocabulary.of(Tokenizer.load(folder))
        vocab = self._vocabulary
        self._tokens = manifest.tokens(folder, split)
        self._windows = find_windows(
            self._tokens, end=vocab.end, newline=vocab.newline, longest=self._room
        )
        num_windows = len(self._windows.starts)
        if not num_windows:
            raise StoreError(
                f"{folder}: no document of the {split} split has {LEAST_TOKENS} tokens. Use "
                "more text"
                + (", or a greater validation_fraction" if split == "validation" else "")
            )
        if pairs == "next" and self._windows.documents[0] == self._windows.documents[-1]:
            raise StoreError(
                f"{folder}: the {split} split has only one document, but pairs='next' needs "
                "segments of two. Use pairs='swap' or more text"
            )
        super().__init__(
            samples=num_windows,
            sequence_length=sequence_length,
            max_samples=max_samples,
            # The samples differ from those of a TokenStream over the same files.
            fingerprint=sha256(f"{manifest.fingerprint(split)} pairs".encode()),
        )

    def __getitems__(self, visits: Sequence[int]) -> np.ndarray:
        """Return int32 rows, which ``as_batch`` splits into tensors.

        Visit ``epoch * len(self) + sample`` selects a sample; ``PADDING`` selects a padding row.
        """
        return np.stack(
            [
                self._padding() if visit == PADDING else self._row(*divmod(int(visit), self._size))
                for visit in visits
            ]
        )

    def as_batch(self, rows: np.ndarray) -> Batch:
        """Split rows into int64 tensors.

        ``input_ids``, ``token_type_ids``, ``attention_mask`` and ``labels`` have shape (b, s),
        ``masked_positions`` has (b, k) and ``next_sentence_label`` has (b,).
        """
        s = self.sequence_length
        k = self.num_predictions
        ids, labels, positions, facts = (
            torch.from_numpy(rows).long().split((s, s, k, _FACTS), dim=1)
        )
        indices = torch.arange(s)
        first_end = facts[:, 0:1]
        second_end = facts[:, 1:2]
        return {
            "input_ids": ids.contiguous(),
            "token_type_ids": ((indices >= first_end) & (indices < second_end)).long(),
            "attention_mask": (indices < second_end).long(),
            "labels": labels.contiguous(),
            "masked_positions": positions.contiguous(),
            "next_sentence_label": facts[:, 2].contiguous(),
        }

    def _row(self, epoch: int, sample: int) -> np.ndarray:
        draws = Draws(self.seed, "bert sample", epoch, sample)
        other_window = (
            self._window(self._other_window(sample, draws)) if self.pairs == "next" else None
        )
        vocab = self._vocabulary
        first, second, label = draw_pair(
            self._window(sample), other_window, room=self._room, draws=draws, vocabulary=vocab
        )
        tokens = np.concatenate(([vocab.cls], first, [vocab.sep], second, [vocab.sep])).astype(
            np.int32
        )
        # A word never continues from one segment into the next. [CLS] and [SEP] are not words.
        first_end = len(first) + 2
        length = len(tokens)
        starts = np.concatenate(
            (
                1 + vocab.word_starts(first),
                [first_end - 1],
                first_end + vocab.word_starts(second),
            )
        )
        sizes = np.diff(starts, append=length - 1)
        is_word = starts != first_end - 1
        budget = number_to_predict(length - _SPECIAL, self.mask_probability)
        chosen = choose_words(starts[is_word], sizes[is_word], budget=budget, draws=draws)
        row = self._padding()
        s = self.sequence_length
        ids, labels, positions, facts = np.split(row, np.cumsum((s, s, self.num_predictions)))
        ids[:length] = tokens
        labels[chosen] = tokens[chosen]
        ids[chosen] = replace_tokens(tokens[chosen], draws=draws, vocabulary=vocab)
        positions[: len(chosen)] = chosen
        facts[:] = first_end, length, label
        return row

    def _padding(self) -> np.ndarray:
        """Return an empty pair without labels.

        Its three tokens can be attended to, because a softmax over nothing is NaN.
        """
        vocab = self._vocabulary
        s = self.sequence_length
        row = np.full(2 * s + self.num_predictions + _FACTS, vocab.pad, np.int32)
        row[:3] = vocab.cls, vocab.sep, vocab.sep
        row[s : 2 * s] = IGNORE_INDEX
        row[2 * s :] = 0
        row[-_FACTS:] = 2, 3, IGNORE_INDEX
        return row

    def _window(self, sample: int) -> np.ndarray:
        return self._tokens.read(
            int(self._windows.starts[sample]), int(self._windows.lengths[sample])
        )

    def _other_window(self, sample: int, draws: Draws) -> int:
        """Return the number of a window of another document."""
        documents = self._windows.documents
        for window in draws.below(len(documents), _TRIES):
            if documents[window] != documents[sample]:
                return int(window)
        # One document fills nearly all of the split: draw among the windows of all other documents.
        candidates = np.flatnonzero(documents != documents[sample])
        return int(candidates[draws.below(len(candidates))[0]])


def check_options(*, sequence_length: int, mask_probability: float) -> None:
    """Check the options of a user.

    Raises:
        ValueError: A value is out of range. The message names the field and values that work.
    """
    check_integer("sequence_length", sequence_length, least=_SPECIAL + LEAST_TOKENS)
    check_fraction("mask_probability", mask_probability, note="; BERT's is 0.15")
