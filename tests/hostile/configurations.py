"""Hostile configurations."""

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from lightning_ptdp.cli.config_files import recipe_folder, resolve_configs
from lightning_ptdp.cli.lightning_cli import parsed_values
from tests.hostile import Case
from tests.hostile.false_files import ODD_FILES, put

__all__ = ["cases"]

_FILE = "mine.yaml"
_BASE = b"base: gpt/nano\n"


def cases(_folder: Path | None = None) -> Iterator[Case]:
    """Yield all cases."""
    # imports the modules that the parser imports at its first use
    parsed_values(resolve_configs(["--config", "gpt/nano"]))
    for what, text in _TEXTS.items():
        for where, before in {"alone": b"", "with a base": _BASE}.items():
            yield _case(f"{what}/{where}", before + text.encode("utf-8", "surrogatepass"), _resolve)
    for what, text in _BINARY.items():
        yield _case(what, text, _resolve)
    for what, odd in ODD_FILES.items():
        # A user names this file, which may be a link or large.
        if what not in ("a link", "a terabyte"):
            yield _case(what, odd, _resolve)
    for what, base in _BASES.items():
        yield _case(f"base is {what}", f"base: {base}\n".encode(), _resolve)
    for what, lines in _VALUES.items():
        yield _case(f"value: {what}", _BASE + lines.encode(), _parse)
    for place in ("model", "trainer", "data", "trainer.callbacks", "config"):
        yield Case(
            f"configuration/{place} names a file of brackets",
            partial(_write_named, place, _TEXTS["brackets"]),
            _parse,
        )
    draw = random.Random(3)
    sound = (recipe_folder() / "common.yaml").read_bytes()
    for number in range(25):
        noise = bytearray(sound)
        for _ in range(20):
            noise[draw.randrange(len(noise))] = draw.choice(b"\0\xff{}[]&*!|>%@`\t")
        yield _case(f"noise {number}", bytes(noise), _resolve, harmless=True)
    yield _case("sound", _BASE + b"trainer: &t {max_steps: 3}\n", _parse, harmless=True)


_TEXTS: Mapping[str, str] = {
    "nothing": "a: *b",
    "brackets": "a: " + "[" * 300_000,
    "closed brackets": "a: " + "[" * 5000 + "]" * 5000,
    "braces": "a: " + "{a: " * 5000,
    "dashes": "a:\n  " + "- " * 50_000,
    "questions": "a:\n  " + "? " * 50_000,
    "5,000 digits": "a: " + "1" * 5000,
    "no integer": "a: !!int ''",
    "no truth": "a: !!bool maybe",
    "no date": "a: 2001-99-99",
    "no time": "a: !!timestamp x",
    "no number": "a: !!float x",
    "no bytes": "a: !!binary z",
    "a call": "a: !!python/object/apply:os.system ['touch ../canary/executed']",
    "a new object": "a: !!python/object/new:subprocess.Popen [[touch, ../canary/executed]]",
    "a module": "a: !!python/module:antigravity",
    "a name": "a: !!python/name:os.system",
    "a key of lists": "? [a]\n: b",
    "a key of numbers": "1: 2",
    "a key of nothing": "~: 2",
    "a tab": "\ta: 1",
    "two documents": "a: 1\n---\na: 2",
    "a list": "- 1\n- 2",
    "an unknown tag": "a: !evil x",
    "an open text": 'a: "x',
    "an open list": "a: [1, 2",
    "a long key": "a" * 100_000 + "\n: 1",
    "half a character": "a: \ud800",
    "a zero byte": "a: \0",
}
_BINARY: Mapping[str, bytes] = {
    "no text": b"\xff\xfe\x00\x01" * 20,
    "utf-16 by halves": "a: 1".encode("utf-16")[:-1],
    "a text": b"text",
    "a number": b"3",
}
_BASES: Mapping[str, str] = {
    "itself": _FILE,
    "itself by another way": f"./out/../{_FILE}",
    "a list": "[gpt/nano]",
    "a mapping": "{a: 1}",
    "a number": "3",
    "nothing": "''",
    "null": "null",
    "a folder": "out",
    "the root": "/",
    "no recipe": "gpt/nanoo",
    "outside of the recipes": "../../../../nowhere",
    "long": "x" * 5000,
    "a zero byte": '"a\\0b"',
    "a line": '"a\\nb"',
}
_VALUES: Mapping[str, str] = {
    "a key of numbers": "trainer: {1: 2}",
    "a key of nothing": "trainer: {~: 2}",
    "an empty key": "'': 1",
    "a key of dots": "..: 1",
    "an unknown key": "trainers: {max_steps: 1}",
    "a text for a mapping": "trainer: x",
    "a date for a number": "trainer: {max_steps: 2001-01-01}",
    "a set for a number": "trainer: {max_steps: !!set {a}}",
    "bytes for a number": "trainer: {max_steps: !!binary aaaa}",
    "infinity for a number": "trainer: {max_steps: .inf}",
    "no number for a number": "trainer: {devices: .nan}",
    "a number for a class": "model: 3",
    "a list for a class": "model: {class_path: [1]}",
    "a mapping for a class": "model: {class_path: {a: 1}}",
    "a module that is not there": "model: {class_path: nosuch.Model}",
    "a function for a class": "model: {class_path: os.system, init_args: {command: 'touch "
    "../canary/executed'}}",
    "a program for a callback": "trainer: {callbacks: [{class_path: subprocess.Popen, init_args: "
    "{args: [touch, ../canary/executed]}}]}",
    "a program for a logger": "trainer: {logger: {class_path: subprocess.Popen, init_args: {args: "
    "[touch, ../canary/executed]}}}",
    "eval for a model": "model: {class_path: builtins.eval, init_args: {source: "
    '\'__import__("os").system("touch ../canary/executed")\'}}',
    "a list for a folder": "data: {init_args: {data_dir: [1, 2]}}",
    "a file that is itself": f"config: {_FILE}",
    "help": "help: 1",
    "print_config": "print_config: true",
}


def _case(
    name: str,
    content: bytes | Callable[[Path], None],
    read: Callable[[Path], None],
    *,
    harmless: bool = False,
) -> Case:
    return Case(
        f"configuration/{name}", lambda folder: put(folder, {_FILE: content}), read, harmless
    )


def _write_named(place: str, text: str, folder: Path) -> None:
    head, _, rest = place.partition(".")
    put(
        folder,
        {
            _FILE: _BASE
            + f"{head}: {f'{{{rest}: named.yaml}}' if rest else 'named.yaml'}\n".encode(),
            "named.yaml": text.encode(),
        },
    )


def _resolve(folder: Path) -> None:
    resolve_configs(["--config", _FILE])


def _parse(folder: Path) -> None:
    parsed_values(resolve_configs(["--config", _FILE]))
