"""Checks of a run's paths.

The paths are folders, the tracking store and prepared data. The clock of the file system is
checked, too.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path

from lightning_ptdp.doctor.machine_checks import Check, enough, failed, ok, warning

_GIB = 2**30
_DISK_BYTES = 5 * _GIB
_CLOCK_S = 2.0


def check_root_dir(folder: Path) -> Check:
    """Check that a file in ``folder``, or in its nearest existing parent, can be written.

    The file is written, flushed, read and removed.
    """
    subject = f"--root-dir {folder}"
    remedy = "use a folder with write permission: --root-dir"
    existing = _existing(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".ptdp-doctor-") as file:
            file.write(b"ptdp")
            file.flush()
            os.fsync(file.fileno())
            if Path(file.name).read_bytes() != b"ptdp":
                return failed(
                    subject,
                    "the content read differs from the content written",
                    "use another file system",
                )
    except OSError as error:
        return failed(subject, f"{existing} cannot be written: {error.strerror or error}", remedy)
    free = shutil.disk_usage(existing).free
    remedy = "free some space: a checkpoint needs about 12 to 16 bytes per parameter"
    return enough(free >= _DISK_BYTES, subject, f"writable, {free / _GIB:.1f} GiB free", remedy)


def check_database_locks(folder: Path) -> Check:
    """Check that SQLite, MLflow's default store, can lock a database in ``folder``.

    Some network file systems do not support locks.
    """
    try:
        with (
            tempfile.TemporaryDirectory(dir=_existing(folder), prefix=".ptdp-doctor-") as inner,
            closing(sqlite3.connect(Path(inner) / "try.db", timeout=2.0)) as database,
            database,
        ):
            database.execute("create table t (x integer)")
            database.execute("insert into t values (1)")
    except (sqlite3.Error, OSError) as error:
        remedy = (
            "use an MLflow server (--trainer.logger.tracking_uri http://host:5000) or a local "
            "folder (--trainer.logger.save_dir)"
        )
        return failed("SQLite store", f"{type(error).__name__}: {error}", remedy)
    return ok("SQLite store", "a database can be written and locked")


def check_tracking_store(tracking_uri: str, *, timeout_s: float) -> Check:
    """Check that an MLflow store or server can be reached. Nothing is changed."""
    from lightning_ptdp.loggers.tracking_store import check_store

    try:
        check_store(tracking_uri, timeout_s=timeout_s)
    except ValueError as error:
        return failed(
            "MLflow store", str(error), "start the server, or use another store: --tracking-uri"
        )
    return ok("MLflow store", f"{tracking_uri} can be used")


def check_data_folder(folder: Path) -> Check:
    """Check that ``folder`` has complete prepared data, by the sizes of its files."""
    from lightning_ptdp.data.data_error import DataError
    from lightning_ptdp.data.manifest import verify_store

    subject = f"--data-dir {folder}"
    try:
        manifest = verify_store(folder, hashes=False)
    except DataError as error:
        return failed(subject, str(error), "create it with ptdp prepare --config …")
    tokens = {name: split.tokens for name, split in manifest.splits.items()}
    counts = ", ".join(f"{count:,} tokens for {name}" for name, count in tokens.items())
    return ok(subject, f"{counts}; a vocabulary of {manifest.vocabulary_size}")


def check_clock(folder: Path) -> Check:
    """Compare this machine's clock with that of the file system, which may be on another one."""
    try:
        with tempfile.NamedTemporaryFile(dir=_existing(folder), prefix=".ptdp-doctor-") as file:
            before = time.time()
            os.utime(file.name)
            off = os.stat(file.name).st_mtime - before
    except OSError as error:
        return failed(
            "clock",
            f"{_existing(folder)} cannot be written: {error.strerror or error}",
            "see --root-dir",
        )
    if abs(off) > _CLOCK_S:
        remedy = (
            "synchronize both clocks with the same time server (chrony, ntpd), because the "
            "newest checkpoint is found by its time"
        )
        return warning("clock", f"the file system's clock is off by {off:+.1f} s", remedy)
    return ok(
        "clock",
        f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, equal to the file system's within "
        f"{max(abs(off), 0.01):.2f} s",
    )


def _existing(folder: Path) -> Path:
    """Return the folder or its nearest existing parent."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
