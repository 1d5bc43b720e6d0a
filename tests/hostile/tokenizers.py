"""Hostile tokenizers: damaged records, damaged models, and false models with matching records."""

import contextlib
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from lightning_ptdp.data import Tokenizer
from tests.hostile import Case
from tests.hostile.data import prepared_files
from tests.hostile.false_files import BROKEN_JSON, FALSE_VALUES, ODD_FILES, put

__all__ = ["cases"]

_MODEL, _RECORD = "tokenizer.model", "tokenizer.json"


def _case(name: str, write: Callable[[Path], None], *, harmless: bool = False) -> Case:
    return Case(f"tokenizer/{name}", write, _read, harmless)


def cases(_folder: Path | None = None) -> Iterator[Case]:
    """Yield all cases."""
    yield _case("sound", partial(_write, {}), harmless=True)
    for what, content in BROKEN_JSON.items():
        yield _case(f"record is {what}", partial(_write, {_RECORD: content}))
        yield _case(f"model is {what}", partial(_write_model, content))
    for name in (_MODEL, _RECORD):
        for what, odd in ODD_FILES.items():
            yield _case(f"{name} is {what}", partial(_write, {name: odd}))
    for key in ("sha256", "vocabulary_size", "fingerprint"):
        for what, value in FALSE_VALUES.items():
            yield _case(f"{key} is {what}", partial(_write_record, key, value))
    model = prepared_files()[_MODEL]
    draw = random.Random(2)
    for number in range(12):
        yield _case(f"model flipped {number}", partial(_write, {_MODEL: _flipped(model, draw, 1)}))
    # The record matches the models below, so that sentencepiece reads them. A different tokenizer
    # that restores texts is harmless.
    for number in range(40):
        noise = _flipped(model, draw, 1 + number)
        yield _case(f"model of noise {number}", partial(_write_model, noise), harmless=True)
    for number in range(10):
        part = model[: draw.randrange(len(model))]
        yield _case(f"model cut off {number}", partial(_write_model, part), harmless=True)
    for what, content in _models().items():
        yield _case(f"model with {what}", partial(_write_model, content), harmless=True)


@cache
def _models() -> dict[str, bytes]:
    """Return models that sentencepiece may accept, with features that ours never have."""
    model = prepared_files()[_MODEL]
    text = model.decode("latin-1")
    assert "<0x41>" in text
    return {
        "a piece that is no text": text.replace("<0x41>", "\xff\xfe\xff\xfe\xff\xfe").encode(
            "latin-1"
        ),
        "a byte piece twice": text.replace("<0x41>", "<0x42>").encode("latin-1"),
        "another name for newline": text.replace("\n\x01\n", "\n\x01!").encode("latin-1"),
        "a normalizer": model
        + _field(3, _field(2, b"\xff\xff\xff\x7f" + b"\x01\x02\x03\x04" * 64)),
        "a short normalizer": model + _field(3, _field(2, b"\x01")),
        "a normalizer of one table": model
        + _field(3, _field(2, (4).to_bytes(4, "little") + b"\xff\xff\xff\xff" + b"x\0")),
        "a denormalizer": model + _field(5, _field(2, b"\x08\0\0\0" + b"\xff" * 32)),
        "an empty piece": model + _field(1, _field(1, b"")),
        "a piece without a score": model + _field(1, _field(1, b"zz") + b"\x15\x00\x00\xc0\x7f"),
        "300,000 more pieces": model
        + b"".join(_field(1, _field(1, b"%06x" % number)) for number in range(300_000)),
        "a piece of a megabyte": model + _field(1, _field(1, b"a" * (1 << 20))),
        "another kind": model + _field(2, b"\x18\x01"),
        "no known kind": model + _field(2, b"\x18\x63"),
        "brackets": b"\x0b" * 100_000,
    }


def _field(number: int, content: bytes) -> bytes:
    """Return a field of bytes in the format of protobuf."""
    length, size = bytearray(), len(content)
    while size >= 128:
        length.append(size & 127 | 128)
        size >>= 7
    length.append(size)
    return bytes([number << 3 | 2]) + bytes(length) + content


def _flipped(content: bytes, draw: random.Random, times: int) -> bytes:
    flipped = bytearray(content)
    for _ in range(times):
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def _write(changed: dict[str, Any], folder: Path) -> None:
    put(folder, {_MODEL: prepared_files()[_MODEL], _RECORD: prepared_files()[_RECORD], **changed})


def _write_record(key: str, value: object, folder: Path) -> None:
    _write(
        {_RECORD: json.dumps({**json.loads(prepared_files()[_RECORD]), key: value}).encode()},
        folder,
    )


def _write_model(content: bytes, folder: Path) -> None:
    """Write a model with a matching record, including all numbers if the model can be read."""
    record = {
        **json.loads(prepared_files()[_RECORD]),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    with contextlib.suppress(ValueError):
        tokenizer = Tokenizer(content)
        record |= {
            "fingerprint": tokenizer.fingerprint,
            "vocabulary_size": tokenizer.vocabulary_size,
        }
    _write({_MODEL: content, _RECORD: json.dumps(record).encode()}, folder)


def _read(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    for text in ("the quick brown fox\n", "\u2581 \u00e9\U0001f600", "a" * 1000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
