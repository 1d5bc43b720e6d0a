"""Lossless byte-pair tokenizer, based on sentencepiece.

Decoding returns every text exactly: nothing is normalized, no space is added or removed, a newline
is a token of its own, and characters outside the vocabulary become bytes. Ids: 0 padding, 1 unknown
(never produced), 2 begin, 3 end of document, 4 newline.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from lightning_ptdp.base.untrusted import inside, read_bytes, read_json
from lightning_ptdp.checkpoint.files import sha256
from lightning_ptdp.data.data_error import TokenizerError, reading

MODEL_FILE = "tokenizer.model"
RECORD_FILE = "tokenizer.json"
_RECORD_BYTES = 1 << 16
_MODEL_BYTES = 1 << 23  # about 450,000 pieces
_REMEDY = "Copy it again, or prepare the data again with overwrite"
_UNKNOWN = 1
_SPACE_MARK = "\u2581"
# Every ASCII character, spaces that a normalizer would remove, and characters of two, three and
# four bytes.
_PROBE = " " + "".join(map(chr, range(1, 128))) + "  a  B\u00e9\u2581\u4e00\U0001f600 \n "
_MARK_BYTES = ("<0xE2>", "<0x96>", "<0x81>")
# The model file contains the number of threads, which therefore must not depend on the machine. The
# pieces do not depend on it.
_TRAIN_THREADS = 4
_MAX_SENTENCE = 1 << 16
_SEGMENT = 1 << 15
_ALWAYS = 256 + 5  # bytes, padding, unknown, begin, end, newline


class Tokenizer:
    """Conversion between text and ids.

    Args:
        model: A serialized sentencepiece model, as ``train`` makes it.

    Attributes:
        model: The serialized sentencepiece model.
        fingerprint: Hash of the pieces.

    Raises:
        TokenizerError: The bytes are not a complete model, or the model lacks pieces that make it
            lossless.
    """

    pad_id = 0
    """Id that fills up rows; it never occurs in a text."""
    bos_id = 2
    """Id of the beginning of a text."""
    eos_id = 3
    """Id that ends every document of a token store."""

    def __init__(self, model: bytes) -> None:
        import sentencepiece

        if not model:
            raise TokenizerError("the tokenizer model is empty (0 bytes)")
        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except (RuntimeError, UnicodeDecodeError) as error:  # the latter from its message
            raise TokenizerError(f"not a sentencepiece model: {_reason(error)}") from error
        try:
            pieces = self.pieces
        except UnicodeDecodeError as error:
            raise TokenizerError(
                f"a piece of the sentencepiece model is not text: {error}"
            ) from error
        self.fingerprint = sha256("\n".join(map(repr, pieces)).encode("utf-8", "backslashreplace"))
        self._mark_ids = [self._processor.piece_to_id(piece) for piece in _MARK_BYTES]
        newline = self._processor.piece_to_id("\n")
        if (
            not all(map(self._processor.is_byte, self._mark_ids))
            or newline == _UNKNOWN
            or self._processor.eos_id() != self.eos_id
        ):
            raise TokenizerError(
                "the sentencepiece model lacks byte pieces, the newline piece or end of document "
                "= 3"
            )
        if not self._is_lossless():
            raise TokenizerError(
                "the sentencepiece model does not reproduce every text. One reason is text with "
                "NUL characters: remove them"
            )

    @classmethod
    def train(
        cls, texts: Iterable[str], *, vocabulary_size: int, control_symbols: Sequence[str] = ()
    ) -> Tokenizer:
        """Learn a vocabulary from texts.

        sentencepiece holds all texts in memory: pass a sample of a big corpus. ``control_symbols``
        such as ``[MASK]`` get ids of their own that no text produces.

        Raises:
            TokenizerError: The texts cannot fill the vocabulary (the message gives the largest size
                that works), the vocabulary cannot hold the alphabet (the message gives the
                smallest), or there is no text.
        """
        import sentencepiece

        errors: list[BaseException] = []
        lines = _recording_errors(_sentences(texts), errors)
        first = next(lines, None)
        if first is None:
            raise TokenizerError("there is no text to train the tokenizer on")
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=chain([first], lines),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocabulary_size,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,
                user_defined_symbols=["\n"],
                control_symbols=list(control_symbols),
                pad_id=cls.pad_id,
                unk_id=_UNKNOWN,
                bos_id=cls.bos_id,
                eos_id=cls.eos_id,
                max_sentence_length=4 * _MAX_SENTENCE,
                num_threads=_TRAIN_THREADS,
                minloglevel=2,
            )
        except Exception as error:
            if errors:
                raise errors[0] from None
            if not isinstance(error, RuntimeError):
                raise
            raise TokenizerError(_training_message(error, vocabulary_size)) from error
        return cls(model.getvalue())

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Load a tokenizer that ``save`` wrote.

        Raises:
            TokenizerError: A file is missing or damaged; the message names it.
        """
        model_file = Path(folder, MODEL_FILE)
        record_file = Path(folder, RECORD_FILE)
        with reading(f"tokenizer file {model_file}", TokenizerError, _REMEDY):
            model = read_bytes(inside(folder, MODEL_FILE), most_bytes=_MODEL_BYTES)
        with reading(f"tokenizer file {record_file}", TokenizerError, _REMEDY):
            record = read_json(inside(folder, RECORD_FILE), most_bytes=_RECORD_BYTES)
            digest = record["sha256"]
        if sha256(model) != digest:
            raise TokenizerError(
                f"tokenizer file {model_file} ({len(model)} bytes) is damaged: its sha256 "
                f"differs from {RECORD_FILE}. {_REMEDY}"
            )
        try:
            tokenizer = cls(model)
        except TokenizerError as error:
            raise TokenizerError(
                f"tokenizer file {model_file} is damaged: {error}. {_REMEDY}"
            ) from error
        recorded = (record.get("vocabulary_size"), record.get("fingerprint"))
        if recorded != (tokenizer.vocabulary_size, tokenizer.fingerprint):
            raise TokenizerError(
                f"tokenizer file {record_file} is damaged: it belongs to another tokenizer. {_REMEDY}"
            )
        return tokenizer

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.model``, and ``tokenizer.json`` with its hash, fingerprint and size."""
        record = {
            "sha256": sha256(self.model),
            "fingerprint": self.fingerprint,
            "vocabulary_size": self.vocabulary_size,
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, MODEL_FILE).write_bytes(self.model)
        Path(folder, RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", "utf-8")

    @property
    def vocabulary_size(self) -> int:
        """Number of ids."""
        return int(self._processor.get_piece_size())

    @property
    def pieces(self) -> list[str]:
        """Text of every id in sentencepiece's form: U+2581 for a space, <0xNN> for a byte."""
        return [str(self._processor.id_to_piece(index)) for index in range(self.vocabulary_size)]

    def is_text(self, index: int) -> bool:
        """Return True if the id stands for text.

        Padding, begin, end, unknown and control symbols do not.
        """
        return not (self._processor.is_control(index) or self._processor.is_unknown(index))

    def control_id(self, symbol: str) -> int:
        """Return the id of a control symbol.

        Raises:
            TokenizerError: The tokenizer was not trained with it.
        """
        index = int(self._processor.piece_to_id(symbol))
        if not self._processor.is_control(index):
            raise TokenizerError(f"the tokenizer has no control symbol {symbol!r}")
        return index

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without begin or end; ``decode`` returns the text exactly."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str], *, num_threads: int = 1) -> list[list[int]]:
        """Return the ids of each text; they do not depend on the number of threads."""
        # sentencepiece would turn U+2581 in a text into a space, so the text is cut there.
        parts = [
            (text_index, number, part)
            for text_index, text in enumerate(texts)
            for segment in _segments(text)
            for number, part in enumerate(segment.split(_SPACE_MARK))
        ]
        encoded = self._processor.encode(
            [part for _, _, part in parts], out_type=int, num_threads=num_threads
        )
        results: list[list[int]] = [[] for _ in texts]
        for (text_index, number, _), ids in zip(parts, encoded, strict=True):
            results[text_index] += [*(self._mark_ids if number else ()), *ids]
        return results

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; padding, begin, end and control symbols produce no text.

        Raises:
            TokenizerError: An id is outside the vocabulary.
        """
        ids = [int(index) for index in ids]
        invalid = [index for index in ids if not 0 <= index < self.vocabulary_size]
        if invalid:
            raise TokenizerError(
                f"id {invalid[0]} is outside the vocabulary of {self.vocabulary_size}"
            )
        return str(self._processor.decode(ids))

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[bytes]]:
        return Tokenizer, (self.model,)

    def _is_lossless(self) -> bool:
        try:
            return self.decode(self.encode(_PROBE)) == _PROBE
        except (RuntimeError, ValueError):
            return False


def _segments(text: str) -> Iterator[str]:
    """Yield pieces of about 32,000 characters whose ids, joined, are the ids of the text.

    No merge crosses a newline, which is always a token of its own. The text is cut because the
    memory for encoding grows more than linearly with the length.
    """
    start = 0
    while len(text) - start > _SEGMENT:
        end = text.find("\n", start + _SEGMENT) + 1
        if not end:
            break
        yield text[start:end]
        start = end
    yield text[start:] if start else text


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Yield lines without newline, cut to the limit above which sentencepiece drops them."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _MAX_SENTENCE):
                yield line[start : start + _MAX_SENTENCE]


def _recording_errors(lines: Iterator[str], errors: list[BaseException]) -> Iterator[str]:
    """Yield the lines, and record an exception among them.

    sentencepiece would replace the exception by one of its own.
    """
    try:
        yield from lines
    except BaseException as error:
        errors.append(error)
        raise


def _training_message(error: RuntimeError, vocabulary_size: int) -> str:
    largest = re.search(r"value <= (\d+)", str(error))
    if largest:
        return (
            f"vocabulary_size={vocabulary_size} is more than the text supports. Use at most "
            f"{largest[1]}, or more text"
        )
    smallest = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
    if smallest or vocabulary_size < _ALWAYS:
        minimum = smallest[1] if smallest else f"{_ALWAYS} and its letters"
        return (
            f"vocabulary_size={vocabulary_size} cannot contain the 256 bytes and the alphabet of "
            f"the text. Use at least {minimum}"
        )
    return f"sentencepiece could not learn vocabulary_size={vocabulary_size}: {_reason(error)}"


def _reason(error: Exception) -> str:
    return str(error).strip() or "the bytes end early or are damaged"
