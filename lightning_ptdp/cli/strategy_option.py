"""The option ``--trainer.strategy CLASS``.

The Trainer takes a name or an object as its strategy, so it would treat the name of a class as a
strategy's name. The options that the configuration gives to the strategy would then be lost, and
Lightning would not know a strategy of that name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_ptdp.cli.bounded_yaml import load_yaml, load_yaml_file
from lightning_ptdp.cli.command_line import options_on

__all__ = ["keep_strategy_options"]

_OPTION = "--trainer.strategy"
_CLASS = "PTDPStrategy"
_CLASS_PATH = "lightning_ptdp.PTDPStrategy"
_NAME = "ptdp"


def keep_strategy_options(arguments: Sequence[str]) -> list[str]:
    """Return a command line in which our strategy keeps the options of earlier configurations.

    A command line that does not name our strategy is unchanged.

    Args:
        arguments: Configurations as ``--config=FILE`` or ``--config=TEXT``, in YAML without a base.
    """
    kept: list[str] = []
    configured: object = None
    for option in options_on(arguments):
        value = option.value or ""
        if option.name == "--config":
            configured = _strategy_of(value, configured)
        if option.name != _OPTION:
            kept += option.words
        elif value.rpartition(".")[2] != _CLASS and value != _NAME:
            configured = None
            kept.append(f"{_OPTION}={value}")
        elif not _is_ours(configured):
            kept.append(
                f"{_OPTION}={value if value == _NAME else json.dumps({'class_path': _CLASS_PATH})}"
            )
    return kept


def _strategy_of(config: str, before: object) -> object:
    values = (
        load_yaml(config)
        if "\n" in config
        else load_yaml_file(config)
        if Path(config).is_file()
        else None
    )
    trainer = values.get("trainer") if isinstance(values, Mapping) else None
    return trainer["strategy"] if isinstance(trainer, Mapping) and "strategy" in trainer else before


def _is_ours(strategy: object) -> bool:
    return (
        isinstance(strategy, Mapping)
        and str(strategy.get("class_path", "")).rpartition(".")[2] == _CLASS
    )
