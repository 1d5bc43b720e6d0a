"""The verb ``ptdp recipes``: list the recipes, or show one of them."""

from __future__ import annotations

import argparse
import re

from lightning_ptdp.base.output import columns
from lightning_ptdp.cli.error_messages import UserError
from lightning_ptdp.cli.imports import import_torchmetrics_alone, uncollected
from lightning_ptdp.cli.inheritance import resolve_config
from lightning_ptdp.cli.recipe_files import find_config, recipe_folder, recipe_names
from lightning_ptdp.world.layout import ParallelLayout

# The first line of every recipe. A test compares the count with the model's.
_FIRST_LINE = re.compile(r"# (?P<count>[\d.]+ [KMBT]) parameters: (?P<summary>.+)")


def run(verb: str, arguments: list[str]) -> int:
    """Run ``ptdp recipes list`` or ``ptdp recipes show NAME [--resolved [--key value …]]``."""
    parser = argparse.ArgumentParser(
        prog=f"ptdp {verb}", description="The recipes of lightning-ptdp."
    )
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
    if options.command == "list":
        _list()
    elif options.resolved:
        with uncollected():
            # a user's class may need those metrics
            if options.name in recipe_names() and not overrides:
                import_torchmetrics_alone()
            from lightning_ptdp.cli.provenance import show_resolved

        print(show_resolved(find_config(options.name, said=""), overrides), end="")
    else:
        print(find_config(options.name, said="").read_text(encoding="utf-8"), end="")
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
