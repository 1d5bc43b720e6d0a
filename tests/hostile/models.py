"""Hostile Hugging Face folders and conversations, including endless chat templates."""

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lightning_ptdp.data import ChatDataModule, chat_format
from lightning_ptdp.data.huggingface_tokenizer import HuggingFaceTokenizer
from lightning_ptdp.exchange.tokenizers import tokenizer_files
from lightning_ptdp.models import LitCausalLM, make_tiny
from tests.hostile import Case
from tests.hostile.false_files import BROKEN_JSON, FALSE_VALUES, ODD_FILES, put

__all__ = ["cases"]

Files = Mapping[str, "bytes | Callable[[Path], None]"]
_CONFIG, _SETTINGS, _CHAT = "config.json", "tokenizer_config.json", "chat.jsonl"
_TOKENIZER = (
    "tokenizer.json",
    _SETTINGS,
    "vocab.txt",
    "merges.txt",
    "tokenizer_extra.json",
    "special_tokens_map.json",
)
_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
    "rope_parameters",
    "dtype",
    "model_type",
    "architectures",
    "pad_token_id",
)
_ROW = b'{"prompt": "a", "response": "b"}\n'
_LIMIT_S = 0.2


def cases(_folder: Path | None = None) -> Iterator[Case]:
    """Yield all cases."""
    _warm()
    yield from _files()
    yield from _configurations()
    yield from _code()
    yield from _conversations()


@cache
def _tiny() -> Files:
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(Path(folder, "model"), vocabulary_size=300)
        return {path.name: path.read_bytes() for path in Path(folder, "model").iterdir()}


@cache
def _warm() -> None:
    """Import the modules that readers import at their first use, and silence transformers."""
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        put(Path(folder, "model"), _tiny())
        _build(Path(folder))
        (Path(folder) / _CHAT).write_bytes(_ROW * 4)
        _chat(Path(folder))


def _case(
    name: str, changed: Mapping[str, Any], read: Callable[[Path], None], *, harmless: bool = False
) -> Case:
    return Case(
        f"model/{name}",
        lambda folder: put(folder / "model", {**_tiny(), **changed}),
        read,
        harmless,
    )


def _files() -> Iterator[Case]:
    for what, odd in ODD_FILES.items():
        gone = what in ("missing", "a folder")  # readers treat the file as absent
        for name in _TOKENIZER:
            yield _case(f"{name} is {what}/tokenizer", {name: odd}, _tokenizer, harmless=gone)
        for name in (*_TOKENIZER, "generation_config.json", "preprocessor_config.json"):
            yield _case(
                f"{name} is {what}/export",
                {name: odd},
                _export,
                harmless=gone or what == "a link to itself",
            )
        for name in (_CONFIG, "generation_config.json", "model.safetensors", "tokenizer.json"):
            yield _case(
                f"{name} is {what}/build",
                {name: odd},
                _build,
                harmless=gone and name not in (_CONFIG, "model.safetensors"),
            )
    for name in (_SETTINGS, "tokenizer.json"):
        for what, content in BROKEN_JSON.items():
            yield _case(f"{name} is {what}", {name: content}, _tokenizer, harmless=True)


def _configurations() -> Iterator[Case]:
    sound = json.loads(bytes(_tiny()[_CONFIG]))

    def configured(name: str, key: str, value: object, *, harmless: bool = False) -> Case:
        content = json.dumps({**sound, key: value}).encode()
        return _case(name, {_CONFIG: content}, _build, harmless=harmless)

    yield _case("sound", {}, _build, harmless=True)
    for what, content in BROKEN_JSON.items():
        yield _case(f"{_CONFIG} is {what}", {_CONFIG: content}, _build)
    values = {
        **FALSE_VALUES,
        "10^9": 10**9,
        "-5": -5,
        "0": 0,
        "NaN": float("nan"),
        "infinity": float("inf"),
    }
    for key in _KEYS:
        for what, value in values.items():
            yield configured(f"{key} is {what}", key, value, harmless=True)
    for key in ("hidden_size", "num_hidden_layers", "intermediate_size"):
        yield configured(f"{key} is a billion", key, 10**9)
    for key, value in {
        "intermediate_size": -5,
        "rms_norm_eps": float("nan"),
        "num_hidden_layers": 10**9,
    }.items():
        yield configured(f"{key} cannot be", key, value)


def _code() -> Iterator[Case]:
    sound, settings = json.loads(bytes(_tiny()[_CONFIG])), json.loads(bytes(_tiny()[_SETTINGS]))
    module = b"import os\nos.system('touch ../../canary/executed')\n"
    classes = {name: f"mine.{name}" for name in ("AutoConfig", "AutoModelForCausalLM")}
    strange = json.dumps({**sound, "model_type": "mine", "auto_map": classes}).encode()
    yield _case("code for the model", {_CONFIG: strange, "mine.py": module}, _build)
    known = json.dumps({**sound, "auto_map": classes}).encode()
    yield _case(
        "code beside a known model", {_CONFIG: known, "mine.py": module}, _build, harmless=True
    )
    own = json.dumps(
        {**settings, "tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    ).encode()
    yield _case(
        "code for the tokenizer", {_CONFIG: strange, _SETTINGS: own, "mine.py": module}, _tokenizer
    )


def _conversations() -> Iterator[Case]:
    yield _talk("sound", _ROW * 4, harmless=True)
    for what, odd in ODD_FILES.items():
        if what != "a link":  # a user names this file, which may be a link
            yield _talk(f"rows are {what}", odd)
    lines = {
        "100,000 brackets": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        "100,000 open brackets": b'{"prompt": ' + b"[" * 100_000 + b"\n",
        "100,000 braces": b'{"a": ' * 100_000 + b"1" + b"}" * 100_000 + b"\n",
        "no UTF-8": b'{"prompt": "\xff", "response": "b"}\n',
        "a list": b"[1]\n",
    }
    for what, line in lines.items():
        yield _talk(f"a row of {what}", _ROW + line)
        yield _talk(f"a first row of {what}", line + _ROW)
    for what, loop in _ENDLESS.items():
        yield _talk(f"a template of {what}", _ROW * 4, loop)


_NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}"
_ENDLESS = {
    "loops": _NESTED + "{% endfor %}{% endfor %}",
    "growing numbers": "{% set n = namespace(x=3) %}"
    + _NESTED
    + "{% set n.x = (n.x * 3) % 99991 %}{% endfor %}{% endfor %}",
    "powers": "{{ 9 ** 9 ** 9 ** 9 }}",
    "itself": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
}


def _talk(name: str, rows: Any, template: str = "", *, harmless: bool = False) -> Case:
    def write(folder: Path) -> None:
        put(folder / "model", _tiny())
        put(folder, {_CHAT: rows})
        if template:
            settings = folder / "model" / "chat_template.jinja"
            settings.write_text(template + settings.read_text())

    return Case(f"conversations/{name}", write, _chat, harmless)


def _tokenizer(folder: Path) -> None:
    HuggingFaceTokenizer(folder / "model").encode("some text")


def _export(folder: Path) -> None:
    tokenizer_files(folder / "model")


def _build(folder: Path) -> None:
    LitCausalLM(str(folder / "model")).configure_model()


def _chat(folder: Path) -> None:
    import datasets

    # These settings change the process of the case only. By default, datasets reports its usage and
    # has a global cache folder.
    chat_format.LIMIT_S = _LIMIT_S
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.config.HF_DATASETS_CACHE = folder / "out"
    ChatDataModule(
        tokenizer_dir=str(folder / "model"),
        path=str(folder / _CHAT),
        data_dir=str(folder / "out" / "store"),
        sequence_length=64,
    ).check()
