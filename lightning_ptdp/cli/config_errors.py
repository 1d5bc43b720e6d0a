"""Checks of a parsed configuration, and short forms of jsonargparse's errors.

jsonargparse lists every type that did not match. ``readable`` keeps the one line that the user
needs.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy

from lightning_ptdp.base.option_types import nearest
from lightning_ptdp.cli.failures import UserError, explain

_BASES: Mapping[str, type] = {
    "model": LightningModule,
    "data": LightningDataModule,
    "trainer.callbacks": Callback,
    "trainer.logger": Logger,
    "trainer.strategy": Strategy,
}
_OPTIONAL = ("sample",)
"""Groups of keys that may be null."""

_MOST_SEED = 2**32 - 1
"""Largest seed that NumPy accepts."""
_ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
_UNKNOWN = re.compile(
    r"Group '(?P<group>[^']+)' does not accept option '(?P<option>[^']+)'"
    r"|Option '(?P<alone>[^']+)' is not accepted"
    r"|unrecognized arguments: --(?P<flag>[\w.+-]+)"
)
_KEY = re.compile(r'Parser key "([^"]+)":\s+')
_TYPE = re.compile(
    r"Expected (?:a )?(?:<class '(?P<kind>.+?)'>|typing\.Literal\[(?P<choices>.+?)\])"
)
_UNION = re.compile(
    r"^ *Errors:\n(?P<errors>.+?)^ *Given value type: .*?\n *Given value: (?P<value>[^\n]*)",
    re.MULTILINE | re.DOTALL,
)


def readable(message: str, known: Iterable[str]) -> str:
    """Return an error of jsonargparse as one line, if it is of a known form.

    The known forms are unknown keys, unknown classes, missing modules, a missing model and values
    of the wrong type. Any other message is returned unchanged.

    Args:
        message: jsonargparse's message.
        known: Dotted names of the parser's own keys.
    """
    outer = re.match(r'Parser key "([^"]+)":', message)
    key = outer.group(1) if outer else ""
    if message.endswith("arguments are required: model"):
        return (
            "there is no model. Use --config with a recipe (ptdp recipes list) or a file, or "
            "--model my_module.LitMine"
        )
    unknown = _UNKNOWN.search(message)
    if unknown:
        return _unknown_key(message, key, unknown, known)
    absent = re.search(r"No module named '(\w+)'", message)
    if absent and (remedy := explain(ModuleNotFoundError(name=absent[1]))) is not None:
        return remedy
    missing = re.search(r"Expected a dot import path string: (\S+)", message)
    if missing:
        names = [kind.__name__ for kind in _subclasses(_BASES[key])] if key in _BASES else []
        return (
            f"{key}={missing.group(1)} is not an existing class{nearest(missing.group(1), names)}"
        )
    # Errors of a class itself, among types that do not match; then errors of its fields.
    for depth in ("  ", " +"):
        matches = re.findall(rf"^{depth}- (.+(?:(?<=:)\n +[^ -].+)?)$", message, re.MULTILINE)
        reasons = [" ".join(reason.split()) for reason in matches]
        causes = [
            cause
            for cause in reasons
            if not cause.startswith(("Expected a ", "Does not validate"))
            and not cause.endswith(":")
        ]
        if len(causes) == 1:
            return f"{key}: {causes[0]}" if key else causes[0]
    if not outer:
        return message
    *_, inner = _KEY.finditer(message)
    name = key if inner[1] == key else f"{key}.{inner[1]}"
    reason = message[inner.end() :]
    union = _UNION.search(reason)
    if union:
        return f"{name}: {_of_union(union['errors'])}. Got value: {union['value'][:80]}"
    line = reason.partition("\n")[0]
    if match := _TYPE.match(line):
        return f"{name}: {_expected(line)}{line[match.end() :]}"
    return message


def check_values(config: Namespace, defaults: Namespace) -> None:
    """Check what jsonargparse and Lightning do not: groups of keys, the seed, the accelerator.

    Raises:
        UserError: A value is wrong. The message names the key, the value and what would work.
    """
    for name, value in vars(defaults).items():
        setting = config.get(name)
        if (
            isinstance(value, Namespace)
            and not isinstance(setting, Namespace)
            and (setting is not None or name not in _OPTIONAL)
        ):
            raise UserError(f"{name}={setting!r} must be a mapping of keys to values")
    seed = config.get("seed_everything")
    if isinstance(seed, int) and not isinstance(seed, bool) and not 0 <= seed <= _MOST_SEED:
        raise UserError(f"seed_everything={seed} must be between 0 and {_MOST_SEED}")
    accelerator = config.get("trainer.accelerator")
    if isinstance(accelerator, str) and accelerator not in _ACCELERATORS:
        raise UserError(f"trainer.accelerator={accelerator} must be one of {_ACCELERATORS}")


def _of_union(errors: str) -> str:
    """Return the first reason that is more than a type's name, else the expected types."""
    reasons = [
        " ".join(reason.split())
        for reason in re.findall(r"^ +- (.+(?:\n {8,}[^ -].+)?)", errors, re.MULTILINE)
    ]
    return next(
        (reason for reason in reasons if not reason.startswith(("Expected ", "Does not validate"))),
        _expected(errors),
    )


def _expected(errors: str) -> str:
    kinds = [
        match["choices"] or match["kind"].rpartition(".")[2] for match in _TYPE.finditer(errors)
    ]
    kinds.sort(key=lambda kind: kind == "NoneType")  # the order depends on jsonargparse's release
    return f"Expected {' or '.join(dict.fromkeys(kinds))}".replace("NoneType", "null").replace(
        "', '", "' or '"
    )


def _unknown_key(message: str, key: str, match: re.Match[str], known_keys: Iterable[str]) -> str:
    name = match["alone"] or match["flag"] or f"{match['group']}.{match['option']}"
    before = re.findall(r"given class_path '([^']+)'", message[: match.start()])
    if not before:
        return f"there is no key {name!r}{nearest(name, known_keys)}"
    hint = nearest(name, _class_keys(before[-1]))
    return f"there is no key {f'{key}.{name}'!r} ({before[-1]} has no {name!r}{hint})"


def _class_keys(class_path: str) -> list[str]:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(
        pkgutil.resolve_name(class_path), fail_untyped=False, sub_configs=True
    )
    return list(dotted(parser.get_defaults()))


def dotted(config: Namespace) -> Iterator[str]:
    """Return the dotted names of all keys, groups included."""
    return map(str, config.keys(branches=True))


def _subclasses(base: type) -> Iterator[type]:
    subclasses: list[type] = base.__subclasses__()
    for kind in subclasses:
        yield kind
        yield from _subclasses(kind)
