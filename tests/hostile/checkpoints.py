"""Hostile checkpoints, exports and state dicts with valid digests.

Every field takes every false value, and every file takes every odd form."""

import functools
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from lightning_ptdp.checkpoint import (
    choose_checkpoint,
    complete_checkpoints,
    load_tensors,
    read_full,
    read_metadata,
    read_state,
    read_whole,
    reshard_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_ptdp.exchange import HuggingFaceNames, HuggingFaceWeights, convert, open_safetensors
from lightning_ptdp.models.gpt import GPT
from lightning_ptdp.models.model_config import GPTConfig
from lightning_ptdp.parameters.placement import Placement
from tests.checkpoint.layouts import replicated
from tests.hostile import Case
from tests.hostile.forged_checkpoints import forge, sign

__all__ = ["cases"]

_CONFIG = GPTConfig.gpt2(
    vocabulary_size=300, sequence_length=8, num_layers=1, hidden_size=16, num_heads=2
)
_LIES: Mapping[str, Any] = {
    "missing": "<missing>",
    "null": None,
    "-1": -1,
    "10^13": 10**13,
    "10^30": 10**30,
    "1.5": 1.5,
    "true": True,
    "text": "x",
    "outside": "../../../../canary/secret.bin",
    "absolute": "/etc/hostname",
    "list": [],
    "lists": [[10**13]],
    "object": {},
    "objects": {"a": {"b": {}}},
    "deep": "<deep>",
    "deeper": "<deeper>",
}
_DEPTHS = {'"<deep>"': 200, '"<deeper>"': 100_000}
_TAGS = (
    "bytes tensor array float complex Size dtype device registered tuple set frozenset dict "
    "OrderedDict Counter bytearray path enum number defaultdict class call"
)
Read = Callable[[Path], object]


def cases(folder: Path) -> Iterator[Case]:
    """Yield all cases; ``folder`` keeps the files from which they are made."""
    whole, export = _made(folder)
    yield from _metadata(whole)
    yield from _index(whole)
    yield from _odd_files(whole)
    yield from _state(whole)
    yield from _saved(whole)
    yield from _huggingface(export)
    yield from _safetensors(export)


def _made(folder: Path) -> tuple[Path, Path]:
    """Return a valid checkpoint and its Hugging Face folder."""
    whole, export = folder / "whole", folder / "export"
    if not whole.exists():
        torch.manual_seed(0)
        state = GPT(_CONFIG).state_dict()
        del state["head.weight"]
        tensors = replicated(state)
        tensors["optimizer/0/step/wte.weight"] = (torch.tensor(3.0), Placement.replicated(()))
        content = {
            "epoch": 1,
            "global_step": 2,
            "hyper_parameters": {"config": asdict(_CONFIG)},
            "optimizer_states": [],
        }
        save_checkpoint(
            whole,
            tensors=tensors,
            state=content,
            metadata={"aliases": {"head.weight": "wte.weight"}, "layout": "t1"},
        )
        convert(whole, export, to="huggingface", prefix="")
    return whole, export


def _neighbours(folder: Path) -> None:
    """Search like ``--resume auto``, for which an odd checkpoint next to others is no error."""
    complete_checkpoints(folder.parent, recursive=True)
    choose_checkpoint(folder)


def _load(folder: Path) -> None:
    load_tensors(folder, replicated({"wte.weight": torch.zeros(300, 16)}))


_READERS: Mapping[str, Read] = {
    "inspect": read_metadata,
    "verify": verify_checkpoint,
    "reshard": lambda folder: reshard_checkpoint(folder, folder.parent / "out" / "r"),
    "load": _load,
    "full": read_full,
    "resume": _neighbours,
    "evaluate": read_whole,
    "convert": lambda folder: convert(folder, folder.parent / "out" / "x.safetensors"),
    "export": lambda folder: convert(folder, folder.parent / "out" / "hf", to="huggingface"),
}


def _case(
    name: str, source: Path, change: Callable[[Path], object], read: Read, *, harmless: bool = False
) -> Case:
    def write(folder: Path) -> None:
        shutil.copytree(source, folder / "c")
        change(folder / "c")

    def read_it(folder: Path) -> None:
        (folder / "out").mkdir(exist_ok=True)
        read(folder / "c")

    return Case(name=name, write=write, read=read_it, harmless=harmless)


def _put(content: Any, place: tuple[Any, ...], lie: Any) -> None:
    """Change the value at ``place`` in parsed JSON."""
    inner = functools.reduce(lambda value, key: value[key], place[:-1], content)
    if lie == "<missing>":
        del inner[place[-1]]
    else:
        inner[place[-1]] = lie


def _dumped(content: Any) -> str:
    text = json.dumps(content)
    for word, depth in _DEPTHS.items():
        text = text.replace(word, "[" * depth + "]" * depth)
    return text


def _lies(
    kind: str,
    source: Path,
    file: str,
    places: Iterator[tuple[Any, ...]] | list[tuple[Any, ...]],
    readers: Mapping[str, Read],
) -> Iterator[Case]:
    """Yield every place of a JSON file with every false value; the readers take turns."""
    turn = cycle(readers.items())
    for place in places:
        for named, lie in _LIES.items():
            reader, read = next(turn)

            def change(folder: Path, place: tuple[Any, ...] = place, lie: Any = lie) -> None:
                content = json.loads((folder / file).read_bytes())
                _put(content, place, lie)
                if file == "metadata.json" and place != ("sha256",):
                    forge(folder, content)
                (folder / file).write_text(
                    _dumped(
                        json.loads((folder / file).read_bytes())
                        if file == "metadata.json"
                        else content
                    )
                )
                if file == "index.json":
                    sign(folder)

            yield _case(
                f"{kind}/{'.'.join(map(str, place))}/{named}/{reader}",
                source,
                change,
                read,
                harmless=True,
            )


def _metadata(whole: Path) -> Iterator[Case]:
    name = "model/wte.weight"
    places: list[tuple[Any, ...]] = [
        *(
            (key,)
            for key in [
                "format",
                "version",
                "created",
                "run",
                "packages",
                "files",
                "tensors",
                "sha256",
            ]
        ),
        *(("run", key) for key in ("aliases", "layout")),
        ("run", "aliases", "head.weight"),
        ("packages", "torch"),
        *(
            ("files", file)
            for file in ("index.json", "state.json", "rank0-0.safetensors", "rank0-0.crc")
        ),
        *(
            ("files", file, key)
            for file in ("state.json", "rank0-0.safetensors")
            for key in ("size", "sha256")
        ),
        ("tensors", name),
        *(("tensors", name, key) for key in ("shape", "dtype")),
        ("tensors", name, "shape", 0),
    ]
    yield from _lies("checkpoint metadata", whole, "metadata.json", places, _READERS)


def _index(whole: Path) -> Iterator[Case]:
    chunk = ("tensors", "model/wte.weight", 0)
    places: list[tuple[Any, ...]] = [
        *((key,) for key in ("format", "byteorder", "files", "tensors")),
        ("files", 0),
        chunk[:2],
        chunk,
        *((*chunk, position) for position in range(4)),
        *((*chunk, position, 0) for position in (2, 3)),
    ]
    readers = {
        name: _READERS[name]
        for name in ("verify", "reshard", "load", "full", "evaluate", "convert")
    }
    yield from _lies("checkpoint index", whole, "index.json", places, readers)


def _odd_files(whole: Path) -> Iterator[Case]:
    def crc(content: bytes) -> Callable[[Path], object]:
        return lambda folder: ((folder / "rank0-0.crc").write_bytes(content), sign(folder))

    sums = {"empty": b"", "cut": b"\0" * 7, "false": b"\0" * 8, "many": b"\0" * (1 << 20)}
    for named, content in sums.items():
        for reader in ("verify", "full", "reshard"):
            yield _case(f"checkpoint sums/{named}/{reader}", whole, crc(content), _READERS[reader])
    forms: Mapping[str, Callable[[Path], object]] = {
        "link": lambda file: (
            file.rename(file.parent.parent / "other"),
            file.symlink_to(file.parent.parent / "other"),
        ),
        "loop": lambda file: (file.unlink(), file.symlink_to(file.name)),
        "device": lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
        "pipe": lambda file: (file.unlink(), os.mkfifo(file)),
        "folder": lambda file: (file.unlink(), file.mkdir()),
        "terabyte": lambda file: os.truncate(file, 1 << 40),
        "nothing": lambda file: file.write_bytes(b""),
    }
    for file in ("metadata.json", "index.json", "state.json", "rank0-0.safetensors", "rank0-0.crc"):
        for (named, form), reader in zip(
            forms.items(), cycle(("verify", "evaluate", "resume")), strict=False
        ):
            yield _case(
                f"checkpoint files/{file}/{named}/{reader}",
                whole,
                lambda folder, f=form, n=file: f(folder / n),
                _READERS[reader],
            )


class _Harm:
    def __reduce__(self) -> Any:
        return os.system, ("touch ../../canary/harm",)


_PICKLES: Mapping[str, bytes] = {
    "call": pickle.dumps(_Harm()),
    "class state": b"\x80\x04cpathlib\nPosixPath\n(N}X\x07\x00\x00\x00is_filecos\ngetcwd\ns\x86b.",
    "torch class state": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x01\x00\x00\x00xK\x01s\x86b.",
    "memo": b"\x80\x04r\xff\xff\xff\xff.",
    "bytearray": b"\x80\x05\x96" + (10**13).to_bytes(8, "little") + b".",
    "text": b"\x80\x04\x8d" + (10**13).to_bytes(8, "little") + b".",
    "number": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    "deep": b"\x80\x04" + b"]" * 20_000 + b"a" * 19_999 + b".",
    "laughs": b"\x80\x02]q\0" + b"".join(b"(h%ch%clq%c" % (n, n, n + 1) for n in range(60)) + b".",
    "empty": b"",
    "cut": b"\x80\x04}(",
    "hub": b"ctorch\nhub.load\n.",
}


def _archive(pickled: bytes, *, packed: bool = False, values: bytes = b"\0" * 16) -> bytes:
    """Return a file in the format of ``torch.save``."""
    stream = io.BytesIO()
    with zipfile.ZipFile(
        stream, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    ) as archive:
        for name, content in {
            "data.pkl": pickled,
            "byteorder": b"little",
            "version": b"3\n",
            "data/0": values,
        }.items():
            archive.writestr(f"archive/{name}", content)
    return stream.getvalue()


def _tensor(
    *,
    numel: int = 4,
    shape: tuple[int, ...] = (4,),
    stride: tuple[int, ...] = (1,),
    offset: int = 0,
    key: str = "0",
) -> bytes:
    """Return the pickle of ``{"w": tensor}``."""

    def number(value: int) -> bytes:
        content = pickle.encode_long(value)
        return b"\x8a" + bytes([len(content)]) + content

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def sizes(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = (
        b"("
        + text("storage")
        + b"ctorch\nFloatStorage\n"
        + text(key)
        + text("cpu")
        + number(numel)
        + b"tQ"
    )
    made = (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + number(offset)
        + sizes(shape)
        + sizes(stride)
        + b"\x89}tR"
    )
    return b"\x80\x02}" + text("w") + made + b"s."


def _state(whole: Path) -> Iterator[Case]:
    def write(folder: Path, content: Any) -> None:
        (folder / "state.json").write_text(
            content if isinstance(content, str) else _dumped(content)
        )
        sign(folder)

    registered = {"$registered": [{"$bytes": [0]}]}
    contents = {
        **{
            f"{tag} of {one}{named}": {"x": {f"${tag}": [lie] if one else lie}}
            for one in ("", "one ")
            for tag in _TAGS.split()
            for named, lie in _LIES.items()
        },
        **{
            f"class {name}": {"x": {"$class": [name, {}]}}
            for name in ("os:environ", "subprocess:Popen", "builtins:exec", ":", "os")
        },
        **{
            f"entry {key} {named}": {key: lie}
            for key in ("epoch", "loops", "optimizer_states")
            for named, lie in _LIES.items()
        },
        "registered": {"x": registered},
        "values": '{"x":[' + "[]," * 30_000_000 + "0]}",
        "constant": '{"x": NaN}',
        "number": '{"x": 1' + "0" * 5000 + "}",
        "cut": '{"x": [',
        "pickle": "\x80\x02ccos\nsystem\n.",
    }
    turn = cycle(
        {"state": read_state, "evaluate": read_whole, "reshard": _READERS["reshard"]}.items()
    )
    for named, content in contents.items():
        reader, read = next(turn)
        change = functools.partial(write, content=content)
        yield _case(f"checkpoint state/{named}/{reader}", whole, change, read, harmless=True)


def _saved(whole: Path) -> Iterator[Case]:
    big = (10**13).to_bytes(8, "little")
    contents = {
        **{f"pickle {named}": _archive(content) for named, content in _PICKLES.items()},
        "numel": _archive(_tensor(numel=10**13)),
        "shape": _archive(_tensor(shape=(10**13,))),
        "stride 0": _archive(_tensor(shape=(10**13,), stride=(0,))),
        "offset": _archive(_tensor(offset=10**13)),
        "negative": _archive(_tensor(shape=(-1,))),
        "dimensions": _archive(_tensor(shape=(1,) * 5000, stride=(1,) * 5000)),
        "key": _archive(_tensor(key="../../../../canary/secret.bin")),
        "packed": _archive(
            _tensor(numel=1 << 24, shape=(1 << 24,)), packed=True, values=b"\0" * (1 << 26)
        ),
        "memory": _archive(b"\x80\x02cbuiltins\nbytearray\n\x8a\x08" + big + b"\x85R."),
        "constructor": _archive(b"\x80\x02ctorch\nFloatTensor\n\x8a\x08" + big + b"\x85R."),
        "list": _archive(b"\x80\x02]."),
        "no archive": b"PK" * 100,
        "cut": _archive(_tensor())[:-40],
    }

    def single(folder: Path, content: bytes, name: str) -> None:
        (folder / name).write_bytes(content)

    for named, content in contents.items():
        for name in ("x.pt", "x.ckpt"):
            put = functools.partial(single, content=content, name=name)
            read = functools.partial(_convert_file, name=name)
            yield _case(
                f"state dict/{name}/{named}/convert",
                whole,
                put,
                read,
                # A storage may claim more elements than its tensors use.
                harmless=named in ("dimensions", "numel"),
            )


def _convert_file(folder: Path, name: str) -> None:
    convert(folder / name, folder.parent / "out" / "c2")


def _from_export(folder: Path) -> None:
    convert(folder, folder.parent / "out" / "c2")


_EXPORT_READERS: Mapping[str, Read] = {
    "convert": _from_export,
    "names": lambda folder: convert(folder, folder.parent / "out" / "c2", names="hf"),
    "init": lambda folder: HuggingFaceWeights.open(folder, HuggingFaceNames(aliases={})),
}


def _huggingface(export: Path) -> Iterator[Case]:
    config = json.loads((export / "config.json").read_bytes())
    yield from _lies(
        "configuration",
        export,
        "config.json",
        [(key,) for key in config],
        {"convert": _from_export},
    )

    def index(folder: Path, content: Any) -> None:
        (folder / "model.safetensors.index.json").write_text(_dumped(content))

    for named, lie in _LIES.items():
        for what, content in (
            ("index", lie),
            ("map", {"weight_map": lie}),
            ("file", {"weight_map": {"transformer.wte.weight": lie}}),
        ):
            for reader, read in _EXPORT_READERS.items():
                yield _case(
                    f"export index/{what}/{named}/{reader}",
                    export,
                    functools.partial(index, content=content),
                    read,
                )


def _safetensors(export: Path) -> Iterator[Case]:
    def change(folder: Path, make: Callable[[dict[str, Any]], Any]) -> None:
        content = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = _dumped(make(json.loads(content[8 : 8 + length]))).encode()
        (folder / "model.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + content[8 + length :]
        )

    def put(header: dict[str, Any], place: tuple[Any, ...], lie: Any) -> Any:
        if place:
            _put(header, place, lie)
            return header
        return lie

    name = "transformer.wte.weight"
    fields: list[tuple[Any, ...]] = [
        (),
        (name,),
        *((name, key) for key in ("dtype", "shape", "data_offsets")),
    ]
    turn = cycle(
        {
            **_EXPORT_READERS,
            "open": lambda folder: open_safetensors(folder / "model.safetensors"),
        }.items()
    )
    for place in [
        *fields,
        (name, "shape", 0),
        (name, "data_offsets", 0),
        (name, "data_offsets", 1),
    ]:
        for named, lie in _LIES.items():
            reader, read = next(turn)
            make = functools.partial(put, place=place, lie=lie)
            where = ".".join(map(str, place)) or "header"
            yield _case(
                f"safetensors/{where}/{named}/{reader}",
                export,
                functools.partial(change, make=make),
                read,
                harmless=True,
            )
    lengths = {"0": 0, "10^13": 10**13, "2^64 - 1": 2**64 - 1, "1": 1}
    for named, length in lengths.items():

        def cut(folder: Path, length: int = length) -> None:
            content = (folder / "model.safetensors").read_bytes()
            (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + content[8:])

        yield _case(f"safetensors/length/{named}/convert", export, cut, _from_export)
