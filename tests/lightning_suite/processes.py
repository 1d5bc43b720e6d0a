"""Execution of each test in several ranks at once, forked from the process that collected it."""

import contextlib
import os
import pickle
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.limits import Limit, running

_LIMIT_S = 90.0
_GRACE_S = 15.0  # for other ranks, after the first failure
_LOST = ("PeerError", "Connection closed by peer", "Connection reset by peer")
_PASSED = "[XPASS(strict)]"  # pytest's report of an expected failure that passed
_OURS = "lightning_ptdp"


class Processes:
    """Runs each test in ``count`` ranks.

    The test fails if rank 0 fails, or if another rank raises an error in the package.

    Args:
        count: World size.
    """

    def __init__(self, count: int) -> None:
        self._count, self._folder = count, Path()

    @pytest.fixture
    def tmp_path(self):
        """Return one folder for all ranks."""
        folder = self._folder / "tmp_path"
        folder.mkdir(exist_ok=True)
        return folder

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Fork the ranks, wait for them, and report."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            self._folder, port = Path(folder), _free_port()
            children = {self._start(rank, port, item): rank for rank in range(self._count)}
            self._wait(children)
            reports = [self._read(rank, item) for rank in range(self._count)]
        for report in min(reports, key=_importance):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _start(self, rank: int, port: int, item: pytest.Item) -> int:
        child = os.fork()
        if child:
            return child
        os.setsid()
        try:
            from lightning.fabric.utilities.rank_zero import rank_zero_only as of_fabric
            from lightning.pytorch.utilities.rank_zero import rank_zero_only

            os.environ |= {
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            rank_zero_only.rank = of_fabric.rank = rank
            reports = runtestprotocol(item, log=False, nextitem=None)
            told = [
                item.config.hook.pytest_report_to_serializable(config=item.config, report=r)
                for r in reports
            ]
            self._file(rank).with_suffix(".part").write_bytes(pickle.dumps(told))
            self._file(rank).with_suffix(".part").rename(self._file(rank))
        finally:
            os._exit(0)

    def _wait(self, children: dict[int, int]) -> None:
        started, limits = list(children), [Limit(_LIMIT_S, running)]
        while children and min(limit.left() for limit in limits) > 0:
            for child, rank in list(children.items()):
                if os.waitpid(child, os.WNOHANG)[0]:
                    del children[child]
                    if not self._file(rank).exists() or b"failed" in self._file(rank).read_bytes():
                        limits.append(Limit(_GRACE_S, running))
            time.sleep(0.01)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for child in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # processes that the test started

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank{rank}"

    def _read(self, rank: int, item: pytest.Item) -> list[Any]:
        if not self._file(rank).exists():
            text = f"PeerError: rank {rank} ended or was ended without a result"
            return [
                pytest.TestReport(
                    item.nodeid,
                    item.location,
                    {},
                    "failed" if when == "call" else "passed",
                    text,
                    when,
                )
                for when in ("setup", "call", "teardown")
            ]
        told = pickle.loads(self._file(rank).read_bytes())
        reports = [
            item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
            for data in told
        ]
        for report in reports:
            report.sections.append(("rank", str(rank)))
        return reports


def _importance(reports: list[Any]) -> int:
    """Return the order of importance of a rank's reports; the smallest is shown.

    - 0: The rank failed by itself.
    - 1: It failed as expected.
    - 2: It failed because it lost another rank.
    - 3: It passed, even if it was expected to fail.
    - 4: It is not rank 0 and failed in the test's own code. Files that tests check often exist on
    rank 0 only."""
    failed = [
        report
        for report in reports
        if report.failed and not str(report.longrepr).startswith(_PASSED)
    ]
    if not failed:
        return 1 if any(hasattr(report, "wasxfail") and report.skipped for report in reports) else 3
    crashes = [getattr(report.longrepr, "reprcrash", None) for report in failed]
    if ("rank", "0") not in failed[0].sections and all(
        crash is not None and _OURS not in crash.path for crash in crashes
    ):
        return 4
    return 2 if all(any(word in str(report.longrepr) for word in _LOST) for report in failed) else 0


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
