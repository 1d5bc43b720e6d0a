"""The verb ``ptdp recipes``: list the recipes, or show one of them."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from lightning_ptdp.base.garbage_collection import garbage_collection_paused
from lightning_ptdp.base.output import columns
from lightning_ptdp.cli.command_line import CONFIG, options_on, verb_parser
from lightning_ptdp.cli.config_files import (
    KeyPath,
    ResolvedConfig,
    dump_yaml,
    find_config,
    has,
    leaves,
    recipe_folder,
    recipe_names,
    resolve_config,
    resolve_configs,
    short,
    value_at,
)
from lightning_ptdp.cli.failures import UserError
from lightning_ptdp.cli.imports import import_torchmetrics_alone
from lightning_ptdp.world.layout import ParallelLayout

# The first line of every recipe. A test compares the count with the model's.
_FIRST_LINE = re.compile(r"# (?P<count>[\d.]+ [KMBT]) parameters: (?P<summary>.+)")


def run(verb: str, arguments: list[str]) -> int:
    """Run ``ptdp recipes list`` or ``ptdp recipes show NAME [--resolved [--key value …]]``."""
    parser = verb_parser(verb, "The recipes of lightning-ptdp.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="list name, size, layout and first line of every recipe")
    show = commands.add_parser(
        "show",
        help="print a recipe as it is written, or as ptdp fit would use it",
        allow_abbrev=False,
    )
    show.add_argument("name", help="a recipe's name, such as gpt/nano, or a file")
    show.add_argument(
        "--resolved",
        action="store_true",
        help="print every value and its origin, including bases and defaults; accepts the "
        "options of ptdp fit",
    )
    options, overrides = parser.parse_known_args(arguments)
    if overrides and not (options.command == "show" and options.resolved):
        raise UserError(
            f"{overrides[0]}: options of ptdp fit need --resolved, as in ptdp recipes show "
            "gpt/nano --resolved"
        )
    if any(option.name in CONFIG for option in options_on(overrides)):
        raise UserError(
            "ptdp recipes show takes one configuration. Give a file with base: "
            f"{options.name} and the changed keys instead of --config"
        )
    if options.command == "list":
        _list()
    elif options.resolved:
        with garbage_collection_paused():
            # a user's class may need those metrics
            if options.name in recipe_names() and not overrides:
                import_torchmetrics_alone()
            text = _show_resolved(find_config(options.name, option=""), overrides)
        print(text, end="")
    else:
        print(find_config(options.name, option="").read_text(encoding="utf-8"), end="")
    return 0


def _list() -> None:
    rows = [
        ("name", "parameters", "devices", "layout", "model"),
        *sorted(map(_row, recipe_names()), key=_by_family_and_size),
    ]
    print(columns(rows, words=(0, 3, 4)))


def _by_family_and_size(row: tuple[str, ...]) -> tuple[str, float]:
    """Return a sort key: the family, then the number of parameters.

    The order is gpt/nano, gpt/124m, gpt/355m, …, gpt/megatron-1.2b, …
    """
    family = row[0].rpartition("-")[0] or row[0].rpartition("/")[0]
    number, _, unit = row[1].partition(" ")
    return family, float(number or 0) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[unit]


def _row(name: str) -> tuple[str, str, str, str, str]:
    file = recipe_folder() / f"{name}.yaml"
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    match = _FIRST_LINE.fullmatch(first)
    count, summary = (
        match.group("count", "summary") if match else ("", first.removeprefix("#").strip())
    )
    trainer = resolve_config(file).values["trainer"]
    devices = trainer["devices"] * trainer.get("num_nodes", 1)
    layout = ParallelLayout.chosen(trainer["strategy"]["init_args"], world_size=devices)
    degrees = [f"{axis.letter}{layout.size(axis.name)}" for axis in layout.named_axes()]
    degrees.insert(2, f"v{layout.virtual_pipeline_size}")
    return name, count, str(devices), " ".join(degrees), summary


# ---- Resolved configurations, with the origin of every value as a comment ----------------------


_OWNERS = {
    "trainer": "lightning.pytorch.Trainer",
    "throughput": "lightning_ptdp.callbacks.Throughput",
    "sample": "lightning_ptdp.cli.serving_verbs.SampleOptions",
}
"""Class of each group of keys, by name: the list of recipes does not import Lightning."""

_COLUMN = 72
"""Column at which the comments of shorter lines start."""


def _show_resolved(file: Path, overrides: Sequence[str]) -> str:
    """Return a resolved configuration as YAML, with the origin of every value as a comment.

    The origin is the recipe or file that sets the value, ``command line``, or ``default of CLASS``.
    The text is a valid configuration for ``ptdp fit --config``.

    Args:
        file: A configuration.
        overrides: Options of ``ptdp fit`` that override the configuration.

    Raises:
        UserError: A key or value is wrong.
    """
    from lightning_ptdp.cli.lightning_cli import parsed_values

    values = parsed_values([*resolve_configs([f"--config={file}"]), *overrides])
    config = resolve_config(file)
    overridden = _override_paths(overrides)
    lines = [
        line if path is None else f"{line:{_COLUMN}}  # {_origin(path, config, overridden, values)}"
        for line, path in _lines(values, ())
    ]
    return "\n".join([*lines, ""])


def _lines(values: Any, path: KeyPath) -> Iterator[tuple[str, KeyPath | None]]:
    """Yield the YAML lines of a mapping or list, each with the path of the value that it ends."""
    entries = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in entries:
        head = f"{key}:" if isinstance(values, dict) else "-"
        inner = value.values() if isinstance(value, dict) else value
        if not isinstance(value, list | dict) or not any(
            isinstance(entry, dict) or isinstance(value, dict) for entry in inner
        ):
            yield f"{head} {_flow(value)}", (*path, key)
            continue
        nested = _lines(value, (*path, key))
        if head == "-":
            line, place = next(nested)
            yield f"- {line}", place
        else:
            yield head, None
        yield from ((f"  {line}", place) for line, place in nested)


def _flow(value: object) -> str:
    """Return a value as YAML on one line."""
    text = dump_yaml(value, default_flow_style=True, width=10**6)
    return text.removesuffix("...\n").strip()


def _origin(
    path: KeyPath, config: ResolvedConfig, overrides: frozenset[KeyPath], values: Mapping[str, Any]
) -> str:
    """Return the origin of the value at ``path``."""
    written = short(path)
    if written in overrides:
        return "command line"
    # If the command line names another class, the parser keeps those of the file's arguments that
    # the new class also accepts.
    replaced = any(written[:depth] in overrides for depth in range(1, len(written)))
    origin = _file_of(path, config)
    if replaced and origin is None and path[-1] == "class_path":
        return "command line"  # an entry added to a list
    if origin is None or (replaced and value_at(config.values, path) != value_at(values, path)):
        owner = _owner(values, path)
        return f"default of {'ptdp fit' if owner is None else owner.__name__}"
    return origin


def _file_of(path: KeyPath, config: ResolvedConfig) -> str | None:
    """Return the file that sets the value, or None."""
    # for logger: CSVLogger, which the parser expands
    if path[-1] == "class_path" and not has(config.values, path):
        path = path[:-1]
        if isinstance(value_at(config.values, path), dict):
            return None
    return config.origin(path)


def _owner(values: Mapping[str, Any], path: KeyPath) -> type | None:
    """Return the class that has the argument at ``path``, or None."""
    owner: type | None = None
    for depth in range(1, len(path)):
        value = value_at(values, path[:depth])
        if depth == 1 and path[0] in _OWNERS:
            owner = pkgutil.resolve_name(_OWNERS[str(path[0])])
        elif isinstance(value, dict) and "class_path" in value:
            owner = pkgutil.resolve_name(value["class_path"])
        elif path[depth - 1] != "init_args" and owner is not None:
            owner = _dataclass_argument(owner, path[depth - 1]) or owner
    return owner


def _dataclass_argument(owner: type, name: str | int) -> type | None:
    """Return the dataclass that is the type of ``owner``'s argument ``name``, or None."""
    if not isinstance(name, str) or name not in inspect.signature(owner).parameters:
        return None
    annotated = owner if is_dataclass(owner) else owner.__init__  # type: ignore[misc]
    hint = get_type_hints(annotated).get(name)
    return next(
        (kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)),
        None,
    )


def _override_paths(overrides: Sequence[str]) -> frozenset[KeyPath]:
    """Return the paths that the options set, without ``init_args``.

    An option may set several keys of a mapping.
    """
    paths: set[KeyPath] = set()
    for option in options_on(overrides):
        path: KeyPath = tuple(option.name.removeprefix("--").removesuffix("+").split("."))
        value = yaml.safe_load(option.value or "")
        paths.update(
            short((*path, *subpath)) for subpath in leaves(value) if not isinstance(value, list)
        )
        if isinstance(value, (list, str)):
            paths.add(path)
    return frozenset(paths)
