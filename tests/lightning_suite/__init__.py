"""A pytest plugin that runs Lightning's own tests through the strategy; their sources are not copied.

From the root of this repository, with a checkout of the installed version of Lightning::

    python -m pytest -p tests.lightning_suite --ptdp-options='{"num_microbatches": 2}' CHECKOUT/tests/tests_pytorch/loops

``Trainer(...)`` calls that name no strategy, accelerator or number of devices of their own get ``PTDPStrategy(**options)``. Tests look into
checkpoints with ``torch.load`` and write them back with ``torch.save``; here both take the folders that the strategy writes.
``exceptions.toml`` says, with a reason each, which tests are left alone and which are known to fail.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ptdp.checkpoint import read_full, read_state

_EXCEPTIONS = Path(__file__).with_name("exceptions.toml")
_torch_load, _torch_save = torch.load, torch.save
_OURS: dict[str, tuple[Any, ...]] = {
    "accelerator": ("auto", "cpu"),
    "strategy": ("auto",),
    "devices": ("auto", 1, "1", -1),
    "num_nodes": (1,),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the strategy, and a way to run without it."""
    group = parser.getgroup("ptdp", "Lightning's tests through PTDPStrategy")
    group.addoption("--ptdp-options", default="{}", help="JSON of PTDPStrategy's arguments")
    group.addoption("--ptdp-off", action="store_true", help="run the same tests without the strategy, to compare")


def pytest_configure(config: pytest.Config) -> None:
    """Register the substitution."""
    config.addinivalue_line("markers", "flaky: tests that pytest-rerunfailures, if it is installed, runs again")
    if not config.getoption("--ptdp-off"):
        config.pluginmanager.register(_Substitution(json.loads(config.getoption("--ptdp-options"))), "ptdp-substitution")


class _Substitution:
    """Gives trainers the strategy while a test runs that is not left alone."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        exceptions = tomllib.loads(_EXCEPTIONS.read_text())
        self._left_alone: dict[str, list[str]] = exceptions["left_alone"]
        self._fails: dict[str, list[str]] = exceptions["one_process"] | (exceptions["options"] if options else {})

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Known failures are run; of a pattern that names a parametrized test, some parameters may pass."""
        for item in items:
            if (reason := _found(item, self._fails)) is not None:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Around fixtures too, which make trainers."""
        if _found(item, self._left_alone) is not None:
            return (yield)
        with pytest.MonkeyPatch.context() as patch:
            self._substitute(patch)
            return (yield)

    def _substitute(self, patch: pytest.MonkeyPatch) -> None:
        from lightning.pytorch import Trainer

        from lightning_ptdp import PTDPStrategy

        init = Trainer.__init__

        @functools.wraps(init)
        def with_strategy(trainer: Any, *args: Any, **kwargs: Any) -> None:
            if _names_nothing_else(kwargs):
                kwargs["strategy"] = PTDPStrategy(**self._options)
            init(trainer, *args, **kwargs)

        patch.setattr(Trainer, "__init__", with_strategy)
        patch.setattr(torch, "load", _load_file_or_folder)
        patch.setattr(torch, "save", _save_file)


def _load_file_or_folder(file: Any, map_location: Any = None, **kwargs: Any) -> Any:
    if _is_folder(file):
        return {**read_state(file), "state_dict": read_full(file)}
    return _torch_load(file, map_location=map_location, **kwargs)


def _save_file(value: Any, file: Any, **kwargs: Any) -> None:
    if _is_folder(file):
        shutil.rmtree(file)
    _torch_save(value, file, **kwargs)


def _is_folder(file: Any) -> bool:
    return isinstance(file, str | os.PathLike) and os.path.isdir(file)


def _names_nothing_else(kwargs: dict[str, Any]) -> bool:
    from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

    if kwargs.get("accelerator", "auto") == "auto" and (CUDAAccelerator.is_available() or MPSAccelerator.is_available()):
        return False  # some tests pretend so
    return all(any(kwargs.get(name, values[0]) == value for value in values) for name, values in _OURS.items())


def _found(item: pytest.Item, patterns: dict[str, list[str]]) -> str | None:
    """The reason whose patterns have the test, by its path inside ``tests_pytorch``."""
    name = item.nodeid.rpartition("tests_pytorch/")[2]
    for reason, tests in patterns.items():
        if any(name.startswith(test) or fnmatchcase(name, test) for test in tests):
            return reason
    return None
