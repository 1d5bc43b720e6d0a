"""An emulator of Google's object storage (from PyPI) in a process of its own."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

BUCKET = "bucket"
SETTING = "STORAGE_EMULATOR_HOST"
_START_S = 60


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Serve one bucket, point gcsfs to it, and yield the address of the server."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from gcp_storage_emulator.__main__ import main; main()"]
    options = [f"--port={port}", "--host=127.0.0.1", "--in-memory", f"--default-bucket={BUCKET}"]
    before = os.environ.get(SETTING)
    with subprocess.Popen(
        [*command, "start", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url, process)
            os.environ[SETTING] = url
            yield url
        finally:
            os.environ.pop(SETTING, None)
            if before is not None:
                os.environ[SETTING] = before
            process.kill()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the bucket can be asked for."""
    until = time.monotonic() + _START_S
    while True:
        assert process.poll() is None, "the server did not start"
        try:
            urllib.request.urlopen(f"{url}/storage/v1/b/{BUCKET}", timeout=_START_S).close()
        except OSError:
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.05)
        else:
            return
