"""A pytest plugin that runs Lightning's own tests with the strategy.

From the root of this repository, with a checkout of the installed version of Lightning::

    python -m pytest -p tests.lightning_suite --ptdp-options='{"num_microbatches": 2}' CHECKOUT/tests/tests_pytorch/loops

``Trainer(...)`` calls without a strategy, accelerator or number of devices get
``PTDPStrategy(**options)``. Tests read checkpoints with ``torch.load`` and write them with
``torch.save``; here both accept the folders that the strategy writes. ``exceptions.toml`` lists,
with reasons, the tests that run without the strategy and the known failures. A known failure that
passes fails the run; remove its line. A test that ends with a refusal of the strategy before the
first batch is an expected failure too, with the refusal's message as the reason. The summary counts
the reasons.

With ``--ptdp-processes 2`` every test that uses the strategy runs in two processes at once. With
``--ptdp-off`` too, it uses Lightning's ``ddp``. A test that also fails there assumes one
process."""

import functools
import json
import os
import shutil
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ptdp.checkpoint import read_full, read_state
from tests.lightning_suite.processes import Processes

_EXCEPTIONS = Path(__file__).with_name("exceptions.toml")
_STRATEGY = os.path.join("lightning_ptdp", "strategy")
_torch_load, _torch_save = torch.load, torch.save
_OURS: dict[str, tuple[Any, ...]] = {
    "accelerator": ("auto", "cpu"),
    "strategy": ("auto",),
    "devices": ("auto", 1, "1", -1),
    "num_nodes": (1,),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    group = parser.getgroup("ptdp", "Lightning's tests through PTDPStrategy")
    group.addoption("--ptdp-options", default="{}", help="JSON of PTDPStrategy's arguments")
    group.addoption(
        "--ptdp-processes", type=int, default=1, help="processes in which each test runs at once"
    )
    group.addoption(
        "--ptdp-off",
        action="store_true",
        help="run the same tests without the strategy, to compare",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the substitution."""
    if "LOCAL_RANK" in os.environ:
        pytest.exit("this is the script that a test started once more, as a launcher does")
    config.addinivalue_line(
        "markers", "flaky: tests that pytest-rerunfailures, if it is installed, runs again"
    )
    off, count = config.getoption("--ptdp-off"), config.getoption("--ptdp-processes")
    if off and count == 1:
        return
    substitution = _Substitution(
        json.loads(config.getoption("--ptdp-options")), count=count, off=off
    )
    config.pluginmanager.register(substitution, "ptdp-substitution")
    if count > 1:
        config.pluginmanager.register(Processes(count), "ptdp-processes")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how often each reason for an expected failure occurred."""
    reasons = Counter(report.wasxfail for report in terminalreporter.stats.get("xfailed", ()))
    for reason, times in reasons.most_common():
        terminalreporter.write_line(f"{times:4d} expected: {reason}")


class _Substitution:
    """Replaces the strategy of trainers during every test that is not exempt."""

    def __init__(self, options: dict[str, Any], *, count: int, off: bool) -> None:
        self._options, self._count, self._off = options, count, off
        exceptions = tomllib.loads(_EXCEPTIONS.read_text())
        self._left_alone: dict[str, list[str]] = exceptions["left_alone"]
        self._fails = [] if off else [exceptions[section] for section in _sections(options, count)]
        self._words: dict[str, list[str]] = {} if off else exceptions["words"]
        self._races: dict[str, list[str]] = exceptions["races"]

    def _leaves_alone(self, item: pytest.Item) -> bool:
        return _found(item, self._left_alone) is not None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark known failures as strict xfail, except races between processes.

        With several processes, deselect the exempt tests."""
        if self._count > 1:
            items[:] = [item for item in items if not self._leaves_alone(item)]
        for item in items:
            for section in self._fails:
                if (reason := _found(item, section)) is not None:
                    # A process that wins a race passes, although the line is still valid.
                    item.add_marker(
                        pytest.mark.xfail(reason=reason, strict=section is not self._races)
                    )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Substitute during fixtures too, because they create trainers."""
        if self._leaves_alone(item):
            return (yield)
        with pytest.MonkeyPatch.context() as patch:
            self._substitute(patch)
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[Any]:
        """Report a refusal as an expected failure."""
        report = yield
        if (
            report.failed
            and call.excinfo is not None
            and (reason := self._reason(call.excinfo.value)) is not None
        ):
            report.outcome, report.wasxfail = "skipped", reason
        return report

    def _reason(self, error: BaseException | None) -> str | None:
        """Return the reason of an expected failure, even if the test expected another error."""
        while error is not None:
            if (refusal := _refusal(error)) is not None:
                return f"refused: {refusal}"
            for reason, words in self._words.items():
                if any(word in str(error) for word in words):
                    return reason
            error = error.__cause__ or error.__context__
        return None

    def _substitute(self, patch: pytest.MonkeyPatch) -> None:
        from lightning.pytorch import Trainer
        from lightning.pytorch.demos.boring_classes import BoringModel

        from lightning_ptdp import PTDPStrategy

        init = Trainer.__init__

        @functools.wraps(init)
        def with_strategy(trainer: Any, *args: Any, **kwargs: Any) -> None:
            if _names_nothing_else(kwargs):
                kwargs["strategy"] = "ddp" if self._off else PTDPStrategy(**self._options)
                kwargs |= {"accelerator": "cpu", "devices": self._count} if self._count > 1 else {}
            init(trainer, *args, **kwargs)

        patch.setattr(Trainer, "__init__", with_strategy)
        if not self._off:
            patch.setattr(torch, "load", _load_file_or_folder)
            patch.setattr(torch, "save", _save_file)
        if self._options.get("pipeline_parallel_size", 1) > 1:
            patch.setattr(BoringModel, "__init__", _deeper(BoringModel.__init__))


def _sections(options: dict[str, Any], count: int) -> Iterator[str]:
    """Yield the sections of ``exceptions.toml`` that apply to these options and processes."""
    yield "one_process"
    pipeline = options.get("pipeline_parallel_size", 1) > 1
    if pipeline or options.get("num_microbatches", 1) > 1:
        yield "schedule"
    if pipeline:
        yield "pipeline"
    if count > 1:
        yield from ("processes", "races")
    if count > options.get("pipeline_parallel_size", 1):
        yield "replicas"


def _deeper(init: Any) -> Any:
    """Wrap ``BoringModel.__init__`` to make a model of two layers, which a pipeline can split."""

    @functools.wraps(init)
    def with_layers(model: Any) -> None:
        init(model)
        model.layer = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 2))

    return with_layers


def _refusal(error: BaseException) -> str | None:
    """Return the message if the strategy refused to start; None for any other error."""
    frames = traceback.extract_tb(error.__traceback__)
    begins = any(
        _STRATEGY in frame.filename and frame.name in ("check_before_launch", "setup")
        for frame in frames
    )
    speaks = isinstance(error, ValueError) or type(error).__name__ == "MisconfigurationException"
    return str(error) if begins and speaks and "lightning_ptdp" in frames[-1].filename else None


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

    if kwargs.get("accelerator", "auto") == "auto" and (
        CUDAAccelerator.is_available() or MPSAccelerator.is_available()
    ):
        return False  # some tests mock an available GPU
    return all(
        any(kwargs.get(name, values[0]) == value for value in values)
        for name, values in _OURS.items()
    )


def _found(item: pytest.Item, patterns: dict[str, list[str]]) -> str | None:
    """Return the reason with a pattern that matches the test's path in ``tests_pytorch``."""
    name = item.nodeid.rpartition("tests_pytorch/")[2]
    for reason, tests in patterns.items():
        if any(name.startswith(test) or fnmatchcase(name, test) for test in tests):
            return reason
    return None
