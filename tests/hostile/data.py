"""Hostile prepared data, stores and indexed files of Megatron."""

import functools
import hashlib
import json
import random
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_ptdp.data import (
    IndexedFile,
    PrepareConfig,
    TextDataModule,
    TokenStream,
    fetch,
    indexed_stream,
    prepare,
    verify_store,
)
from lightning_ptdp.data.token_store import ChunkMap
from tests.data.conftest import write_corpus
from tests.hostile import Case
from tests.hostile.false_files import (
    BROKEN_JSON,
    FALSE_NUMBERS,
    FALSE_VALUES,
    ODD_FILES,
    names_outside,
    put,
)

__all__ = ["cases", "prepared_files"]

_VOCABULARY = 300
_CHUNK = "train/chunk-0-0.bin"
_INDEX = "train/index.json"
Change = Callable[[Path, dict[str, Any]], None]
"""Changes an index or a manifest in its folder."""


@cache
def prepared_files() -> Mapping[str, bytes]:
    """Return the files of a valid prepared folder."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder, "text"), documents=12)
        made = prepare(
            PrepareConfig(
                output=Path(folder, "store"),
                source=str(corpus),
                vocabulary_size=_VOCABULARY,
                chunk_tokens=5000,
                validation_fraction=0.2,
            )
        )
        return {
            path.relative_to(made.folder).as_posix(): path.read_bytes()
            for path in made.folder.rglob("*")
            if path.is_file()
        }


def cases(_folder: Path | None = None) -> Iterator[Case]:
    """Yield all cases."""
    prepared_files()
    yield from _manifests()
    yield from _indices()
    yield from _damage()
    yield from _indexed()


def _manifests() -> Iterator[Case]:
    for reader, read in _READERS.items():
        for what, content in {**BROKEN_JSON, **ODD_FILES}.items():
            yield _prepared(f"manifest is {what}/{reader}", {"manifest.json": content}, read)
        for what in names_outside(_anywhere()):
            yield _lie(f"name {what}/{reader}", partial(_name_outside, what), read)
    for place in (
        "vocabulary_size",
        "splits.train.tokens",
        f"files.{_CHUNK}.size",
        "corpus.characters",
    ):
        for what, value in FALSE_VALUES.items():
            # The number of characters cannot be checked.
            true = place == "corpus.characters" and what == "10^13"
            yield _lie(f"{place} is {what}", partial(_set, place, value), _verify, harmless=true)
    for place in (
        "format",
        "form",
        "splits",
        "files",
        "splits.train",
        "splits.train.dtype",
        f"files.{_CHUNK}",
        f"files.{_CHUNK}.sha256",
    ):
        for what, value in {**FALSE_VALUES, "an object": "O", "a path": "../x"}.items():
            yield _lie(f"{place} is {what}", partial(_set, place, value), _verify)
    for name in (_CHUNK, _INDEX, "tokenizer.model", "tokenizer.json"):
        yield _lie(f"{name} is not listed", partial(_drop, f"files.{name}"), _verify)
    for place in ("splits.train", "splits.validation", "corpus", "vocabulary_size", "files"):
        yield _lie(f"no {place}", partial(_drop, place), _verify)


def _indices() -> Iterator[Case]:
    for reader, read in _READERS.items():
        for what, content in BROKEN_JSON.items():
            yield _lie(f"index is {what}/{reader}", lambda *_: None, read, {_INDEX: content})
    for what in names_outside(_anywhere()):
        yield _lie_of_index(f"chunk {what}", partial(_chunk_outside, what))
    for what, value in FALSE_VALUES.items():
        for place in ("chunks", "chunks.0", "chunks.0.filename", "chunks.0.dim"):
            yield _lie_of_index(f"{place} is {what}", partial(_set, place, value))
    yield _lie_of_index(
        "a chunk twice", lambda _, index: index["chunks"].append(index["chunks"][0])
    )
    yield _lie_of_index(
        "a million chunks", lambda _, index: index["chunks"].extend([index["chunks"][0]] * 300_000)
    )
    for what, tokens in {
        "outside": b"\xff\xff",
        "just outside": struct.pack("<H", _VOCABULARY),
    }.items():
        chunk = bytearray(prepared_files()[_CHUNK])
        chunk[112:114] = tokens
        yield _lie(
            f"a token {what} of the vocabulary", lambda *_: None, _stream, {_CHUNK: bytes(chunk)}
        )


def _damage() -> Iterator[Case]:
    draw = random.Random(0)
    for name, content in prepared_files().items():
        for number in range(6):
            flipped = bytearray(content)
            flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
            yield _prepared(f"{name} flipped {number}", {name: bytes(flipped)}, _verify)
        for number in range(3):
            yield _prepared(
                f"{name} cut off {number}",
                {name: content[: draw.randrange(len(content))]},
                _fetch if number else _verify,
            )
        for what, odd in ODD_FILES.items():
            if name != "manifest.json":
                for reader, read in _READERS.items():
                    yield _prepared(f"{name} is {what}/{reader}", {name: odd}, read)
    for name, read in (("sound", _stream), ("sound/fetch", _fetch)):
        yield _prepared(name, {}, read, harmless=True)


def _prepared(
    name: str, changed: Mapping[str, Any], read: Callable[[Path], None], *, harmless: bool = False
) -> Case:
    return Case(
        f"prepared/{name}",
        lambda folder: put(folder / "store", {**prepared_files(), **changed}),
        read,
        harmless,
    )


def _lie(
    name: str,
    change: Change,
    read: Callable[[Path], None],
    files: Mapping[str, bytes] | None = None,
    *,
    harmless: bool = False,
) -> Case:
    """Return a case with a false manifest whose digest and hashes are valid."""

    def write(folder: Path) -> None:
        put(
            folder / "store",
            _sealed(folder / "store", {**prepared_files(), **(files or {})}, change),
        )

    return Case(f"prepared/{name}", write, read, harmless)


def _lie_of_index(name: str, change: Change) -> Case:
    """Return a case with a false index and a manifest that matches it."""

    def write(folder: Path) -> None:
        index = json.loads(prepared_files()[_INDEX])
        change(folder / "store" / "train", index)
        files = {**prepared_files(), _INDEX: json.dumps(index).encode("utf-8", "surrogatepass")}
        put(folder / "store", _sealed(folder / "store", files, lambda *_: None))

    return Case(f"prepared/index: {name}", write, _stream)


def _sealed(folder: Path, files: Mapping[str, bytes], change: Change) -> dict[str, bytes]:
    values = json.loads(files["manifest.json"])
    del values["sha256"]
    values["files"] = {
        name: _record(content) for name, content in files.items() if name != "manifest.json"
    }
    change(folder, values)
    seal = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    return {**files, "manifest.json": json.dumps({**values, "sha256": seal}).encode()}


def _record(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _holder(place: str, values: Any) -> tuple[Any, Any]:
    """Return the container of the value at a place, and its key."""
    *path, last = _keys(place)
    return functools.reduce(lambda holder, key: holder[key], path, values), last


def _set(place: str, value: object, folder: Path, values: dict[str, Any]) -> None:
    holder, last = _holder(place, values)
    holder[last] = value


def _drop(place: str, folder: Path, values: dict[str, Any]) -> None:
    holder, last = _holder(place, values)
    del holder[last]


def _keys(place: str) -> list[Any]:
    """Split a place such as ``files.train/chunk-0-0.bin.size``, whose file name has dots."""
    head, _, rest = place.partition(".")
    if head == "files" and rest:
        end = next((f".{key}" for key in ("size", "sha256") if rest.endswith(f".{key}")), "")
        return [head, rest.removesuffix(end), *([end[1:]] if end else [])]
    return [int(key) if key.isdigit() else key for key in place.split(".")]


def _name_outside(what: str, folder: Path, values: dict[str, Any]) -> None:
    # The entry is read first, and is valid: a reader that follows it finds the recorded content.
    record = _record((_root(folder) / "secret.bin").read_bytes())
    values["files"] = {names_outside(folder)[what]: record, **values["files"]}


def _chunk_outside(what: str, folder: Path, index: dict[str, Any]) -> None:
    tokens = ((_root(folder) / "secret.bin").stat().st_size - 12) // 2
    index["chunks"].insert(
        0, {**index["chunks"][0], "filename": names_outside(folder)[what], "dim": tokens}
    )


def _root(folder: Path) -> Path:
    return next(parent / "canary" for parent in folder.parents if (parent / "canary").is_dir())


def _anywhere() -> Path:
    """Return a folder for listing names before a case's folder exists."""
    return Path("/any/case/store")


def _verify(folder: Path) -> None:
    verify_store(folder / "store")


def _fetch(folder: Path) -> None:
    fetch(f"local:{folder / 'store'}", folder / "out" / "copy")


def _stream(folder: Path) -> None:
    data = TextDataModule(
        data_dir=str(folder / "store"), vocabulary_size=_VOCABULARY, sequence_length=32
    )
    data.setup()
    for split in ("train", "validation"):
        stream = TokenStream(folder / "store", split=split, sequence_length=32)
        assert stream.__getitems__(range(len(stream))).max() < _VOCABULARY


_READERS = {"verify": _verify, "fetch": _fetch}


def _indexed() -> Iterator[Case]:
    header = {"version": (9, "<Q"), "sequences": (18, "<Q"), "boundaries": (26, "<Q")}
    for field, (place, form) in header.items():
        for value in (0, 1, 2, 10**6, 10**13, 2**62, 2**63, 2**64 - 1):
            yield _index_file(
                f"{field} is {value}",
                partial(_pack, place, form, value),
                harmless=(field, value) == ("version", 1),
            )
    for code in (0, 1, 2, 3, 4, 5, 6, 7, 9, 63, 255):
        # type 3 has the same width, and the ids fit
        yield _index_file(f"type is {code}", partial(_pack, 17, "<B", code), harmless=code == 3)
    for value in (-1, -(2**31), 2**31 - 1, 0, 10**9):
        for sequence in (0, 7, 19):
            yield _index_file(
                f"length {sequence} is {value}", partial(_pack, 34 + 4 * sequence, "<i", value)
            )
    for value in (-1, -(2**63), 2**63 - 1, 1, 10**13):
        for sequence in (0, 7, 19):
            for field, place in (("pointer", 34 + 80), ("boundary", 34 + 240)):
                yield _index_file(
                    f"{field} {sequence} is {value}",
                    partial(_pack, place + 8 * sequence, "<q", value),
                )
    for suffix in ("idx", "bin"):
        for what, odd in ODD_FILES.items():
            if what != "a link":  # a user names these files, which may be links
                yield _indexed_case(f"{suffix} is {what}", partial(_write_odd, suffix, odd))
        for length in (0, 1, 8, 33, 34, 35, 113, 300):
            yield _indexed_case(f"{suffix} ends at {length}", partial(_write_cut, suffix, length))
    draw = random.Random(1)
    for number in range(12):
        yield _indexed_case(f"noise {number}", partial(_write_noise, draw.randbytes(400)))
    yield _index_file("sound", bytes, harmless=True)
    for value in FALSE_NUMBERS:
        yield _indexed_case(f"a token is {value}", partial(_write_token, value))


def _indexed_case(name: str, write: Callable[[Path], None], *, harmless: bool = False) -> Case:
    return Case(f"indexed/{name}", write, _read_indexed, harmless)


def _index_file(name: str, change: Callable[[bytes], bytes], *, harmless: bool = False) -> Case:
    return _indexed_case(name, lambda folder: _write_indexed(folder, change), harmless=harmless)


def _pack(place: int, form: str, value: int, index: bytes) -> bytes:
    data = struct.pack(form, value)
    return index[:place] + data + index[place + len(data) :]


def _sound_index() -> bytes:
    """Return the index of 20 documents, each with one sequence of 10 tokens."""
    return (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, 20, 21)
        + np.full(20, 10, "<i4").tobytes()
        + np.arange(0, 400, 20, dtype="<i8").tobytes()
        + np.arange(21, dtype="<i8").tobytes()
    )


def _write_indexed(folder: Path, change: Callable[[bytes], bytes]) -> None:
    put(
        folder,
        {"tokens.idx": change(_sound_index()), "tokens.bin": np.arange(200, dtype="<u2").tobytes()},
    )


def _write_odd(suffix: str, odd: Callable[[Path], None], folder: Path) -> None:
    _write_indexed(folder, bytes)
    (folder / f"tokens.{suffix}").unlink()
    odd(folder / f"tokens.{suffix}")


def _write_cut(suffix: str, length: int, folder: Path) -> None:
    _write_indexed(folder, bytes)
    path = folder / f"tokens.{suffix}"
    path.write_bytes(path.read_bytes()[:length])


def _write_noise(noise: bytes, folder: Path) -> None:
    _write_indexed(folder, lambda index: index[:34] + noise[: len(index) - 34])


def _write_token(what: str, folder: Path) -> None:
    """Write files with eight bytes per token, one of which is false."""
    value = {
        "-1": -1,
        "10^13": 10**13,
        "10^30": 2**63 - 1,
        "1e300": -(2**63),
        "a half": 300,
        "true": 2**31,
    }[what]
    tokens = np.zeros(200, "<i8")
    tokens[50] = value
    index = _pack(17, "<B", 5, _sound_index())
    index = index[:114] + np.arange(0, 1600, 80, dtype="<i8").tobytes() + index[274:]
    put(folder, {"tokens.idx": index, "tokens.bin": tokens.tobytes()})


def _read_indexed(folder: Path) -> None:
    chunks = IndexedFile(folder / "tokens").chunks("all", 0.2)
    ChunkMap(chunks, vocabulary_size=_VOCABULARY).check()
    for split in ("train", "validation"):
        stream = indexed_stream(
            folder / "tokens",
            split=split,
            sequence_length=4,
            vocabulary_size=_VOCABULARY,
            validation_fraction=0.2,
        )
        stream.__getitems__(range(len(stream)))
