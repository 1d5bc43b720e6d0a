"""Confinement of a case in a separate process that records side effects, time and memory.

Side effects are files opened or changed outside the case's folder, and programs started. A canary
folder is next to the folders of the cases. The process is a fork, so that the modules of a reader
are already imported. Files that Python and libraries open in their own folders do not count."""

import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.hostile import Case

__all__ = ["CANARY", "MOST_MB", "MOST_S", "Confinement", "Outcome"]

CANARY = "canary"
MOST_S = 1.0  # processor time, because the machine may be busy
_PATIENCE_S = 15.0  # wall clock, because waiting for a pipe takes no processor time
MOST_MB = 200.0
# beyond the address space in use, so that huge allocations raise MemoryError
_ADDRESS_SPACE = 4 << 30
_PACKAGE = Path(__file__).resolve().parents[2] / "lightning_ptdp"
_EVALUATING = (
    "typing.py",
    "collections/__init__.py",
    "attr/_make.py",
    "dataclasses.py",
    "enum.py",
    "inspect.py",
    "annotationlib.py",
    "jinja2/environment.py",
    "jinja2/debug.py",
)
_PATHS = {
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.link": (0, 1),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.utime": (0,),
    "os.setxattr": (0,),
    "shutil.rmtree": (0,),
    "shutil.move": (0, 1),
}
_READS = ("os.listdir", "os.scandir")
_EXECUTIONS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "pty.spawn",
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a case.

    Attributes:
        name: Name of the case.
        said: Message of the error; "" if there was none.
        seconds: Processor time.
        megabytes: Growth of the memory at its peak.
        outside: Paths outside the folder that were opened, removed or changed.
        executed: Programs and code that were started.
        wrong: Violated requirements; "" if there are none.
    """

    name: str
    said: str = ""
    seconds: float = 0.0
    megabytes: float = 0.0
    outside: tuple[str, ...] = ()
    executed: tuple[str, ...] = ()
    wrong: str = ""

    @property
    def kind(self) -> str:
        """Return the kind of the case, which is the first part of its name."""
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Confinement:
    """A folder for cases, with a canary."""

    root: Path

    def __post_init__(self) -> None:
        canary = self.root / CANARY
        canary.mkdir(parents=True)
        (canary / "secret.bin").write_bytes(bytes(range(256)) * 4)
        (canary / "folder").mkdir()
        (canary / "folder" / "letter.txt").write_text("not for you")
        _unread(canary)

    def run(self, case: Case) -> Outcome:
        """Write and read a case; remove its folder afterwards."""
        folder = self.root / "case"
        folder.mkdir()
        before = _inventory(self.root / CANARY)
        try:
            reply, status = _forked(lambda: _confined(case, folder), folder)
            wrong = "" if reply is not None else _ended(status)
            outcome = Outcome(
                name=case.name, **(reply or {}), **({"wrong": wrong} if wrong else {})
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        touched = {name for name, _ in _inventory(self.root / CANARY).items() ^ before.items()}
        _unread(self.root / CANARY)
        stray = {entry.name for entry in self.root.iterdir()} - {CANARY}
        return _judged(case, outcome, sorted({*touched, *stray}))


def _judged(case: Case, outcome: Outcome, touched: list[str]) -> Outcome:
    wrongs = [
        outcome.wrong,
        "" if not touched else f"the canary is not as it was: {', '.join(touched)}",
        "" if not outcome.executed else f"started {outcome.executed[0]}",
        "" if not outcome.outside else f"outside: {outcome.outside[0]}",
        "" if outcome.seconds <= MOST_S else f"{outcome.seconds:.1f} s",
        "" if outcome.megabytes <= MOST_MB else f"{outcome.megabytes:.0f} MB",
        "" if outcome.said or case.harmless or outcome.wrong else "was accepted",
    ]
    return replace(outcome, wrong="; ".join(wrong for wrong in wrongs if wrong))


def _confined(case: Case, folder: Path) -> dict[str, Any]:
    """Write and read a case in its process; return the fields of its ``Outcome``."""
    (folder / "out").mkdir()
    tempfile.tempdir = str(folder / "out")
    sys.dont_write_bytecode = True
    case.write(folder)
    _unread(folder.parent / CANARY)  # the case may have read the canary to forge its hash
    os.chdir(folder)
    watch = _Watch(folder)
    gc.collect()
    gc.disable()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory
    before, began = _memory("VmRSS"), time.process_time()
    limit = _memory("VmSize") * 1024 + _ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (int(limit), int(limit)))
    sys.addaudithook(watch)
    said, wrong = "", ""
    try:
        case.read(folder)
    except BaseException as error:  # any error is part of the outcome
        said = str(error) or type(error).__name__
        wrong = _unnamed(error, said, case, folder)
    watch.off = True
    seconds, megabytes = time.process_time() - began, (_memory("VmHWM") - before) / 1024
    return {
        "said": said[:2000],
        "wrong": wrong,
        "seconds": seconds,
        "megabytes": megabytes,
        "outside": watch.outside[:5],
        "executed": watch.executed[:5],
    }


def _unnamed(error: BaseException, said: str, case: Case, folder: Path) -> str:
    """Return why an error is unacceptable; "" if it is of the package and names a file."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    ours = type(error).__module__.startswith("lightning_ptdp") or Path(
        place.filename
    ).is_relative_to(_PACKAGE)
    if not isinstance(error, ValueError) or not ours:
        return f"{type(error).__name__} of {place.filename}:{place.lineno}: {said[:200]}"
    if "\n" in said or len(said) > 1500:
        return f"more than a sentence: {said[:300]!r}"
    # Errors of a configuration name the key instead of the file.
    names = {path.name for path in folder.rglob("*")} | {path.stem for path in folder.rglob("*")}
    named = (
        case.name.startswith("configuration")
        or str(folder) in said
        or any(name in said for name in names if len(name) > 1)
    )
    return "" if named else f"no file is named: {said[:300]}"


@dataclass
class _Watch:
    """Audit hook that records the files that Python opens and the programs that it starts."""

    folder: Path
    outside: list[str] = field(default_factory=list)
    executed: list[str] = field(default_factory=list)
    off: bool = False

    def __post_init__(self) -> None:
        self._own = os.path.realpath(self.folder)
        here = str(Path(__file__).resolve().parents[2])
        libraries = {
            sys.prefix,
            sys.base_prefix,
            os.path.dirname(os.__file__),
            here,
            *filter(None, sys.path),
        }
        whole = {os.path.realpath(path) + os.sep for path in libraries}
        self._libraries = tuple(path for path in whole if not self._own.startswith(path))
        self._system = (
            "/proc/",
            "/dev/null",
            "/dev/urandom",
            "/sys/",
            "/usr/share/zoneinfo",
            "/etc/localtime",
            "/etc/mime.types",
        )

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.off:
            return
        if event == "open":
            path, _, flags = arguments
            self._touch(
                event,
                path,
                writes=bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)),
            )
        elif event in _READS:
            self._touch(event, arguments[0], writes=False)
        elif event in _PATHS:
            for place in _PATHS[event]:
                self._touch(event, arguments[place], writes=True, follows=False)
        elif event in _EXECUTIONS or event.startswith("socket."):
            if event != "socket.gethostname":
                self.executed.append(f"{event} {str(arguments)[:200]}")
        elif event == "exec":
            self._exec(arguments[0])
        elif event == "ctypes.dlopen":
            self._touch(event, arguments[0], writes=False)

    def _touch(self, event: str, path: Any, *, writes: bool, follows: bool = True) -> None:
        if path is None or isinstance(path, int):
            return
        text = os.fsdecode(path)
        if event == "ctypes.dlopen" and os.sep not in text:
            return
        whole = (
            os.path.realpath(text)
            if follows
            else os.path.join(
                os.path.realpath(os.path.dirname(text) or "."), os.path.basename(text)
            )
        )
        inside = f"{whole}{os.sep}".startswith(self._own + os.sep)
        known = whole.startswith(self._system) or (
            not writes and f"{whole}{os.sep}".startswith(self._libraries)
        )
        if not inside and not known:
            self.outside.append(f"{event} {whole}")

    def _exec(self, code: Any) -> None:
        name = str(getattr(code, "co_filename", code))
        caller = sys._getframe(2).f_code.co_filename
        if name.startswith("<") and (
            name.startswith("<frozen") or caller.endswith(_EVALUATING) or "jsonargparse" in caller
        ):
            return
        if not os.path.realpath(name).startswith(self._libraries):
            self.executed.append(f"exec {name} from {caller}")


def _forked(work: Callable[[], dict[str, Any]], folder: Path) -> tuple[dict[str, Any] | None, int]:
    """Run ``work`` in a forked process; return its result and the wait status of the process.

    The result is None if the process wrote nothing before it ended or ran out of time.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    gc.freeze()  # the child's collection skips what is imported here
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            silent = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(silent, stream)
            os.write(writing, json.dumps(work()).encode("utf-8", "replace"))
            status = 0
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(
                    writing,
                    json.dumps({"wrong": f"could not be written: {error!r}"[:500]}).encode(),
                )
        finally:
            os._exit(status)
    os.close(writing)
    data = b"".join(_read_for(reading, _PATIENCE_S))
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return (json.loads(data) if data else None), os.waitpid(child, 0)[1]


def _read_for(descriptor: int, seconds: float) -> Iterator[bytes]:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left)[0]:
            return
        block = os.read(descriptor, 1 << 16)
        if not block:
            return
        yield block


def _ended(status: int) -> str:
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return (
        f"waited for more than {_PATIENCE_S:.0f} s"
        if number == signal.SIGKILL
        else f"the process ended with signal {number}"
    )


def _memory(name: str) -> float:
    """Return a field of ``/proc/self/status``, in kilobytes."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{name}:")
    )
    return float(line.split()[1])


def _unread(folder: Path) -> None:
    """Set access times before write times, so that most file systems record the next read."""
    for path in folder.rglob("*"):
        os.utime(path, (1e9, 1.1e9))


def _inventory(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return mode, size, write time and access time of every file and folder, by path."""
    found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        stat = path.lstat()
        read = stat.st_atime_ns if path.is_file() else 0  # this function itself reads folders
        found[str(path.relative_to(folder.parent))] = (
            stat.st_mode,
            stat.st_size,
            stat.st_mtime_ns,
            read,
        )
    return found
