"""A real S3 server (moto's) in a process of its own, which can be told to fail."""

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

BUCKET = "bucket"
SECRET = "secret-of-the-test"
SETTINGS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION")
_ANSWER_S = 60
_HANG_S = 300


class Server:
    """A running server.

    Attributes:
        url: Its address.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def fail(self, method: str, path: str, kind: str, *, count: int) -> None:
        """Let the next ``count`` requests of a method for a path (a pattern) fail.

        The kinds are "hang", "reset", and the status and code of an answer, "503 SlowDown".
        """
        self._ask("fail", {"method": method, "path": path, "kind": kind, "count": count})

    def requests(self) -> list[dict[str, Any]]:
        """Return method, path, sent bytes and failure of all requests since the last call."""
        answer: list[dict[str, Any]] = self._ask("requests", {})
        return answer

    def _ask(self, what: str, content: object) -> Any:
        request = urllib.request.Request(
            f"{self.url}/_test/{what}", data=json.dumps(content).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return json.loads(answer.read())


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """Serve S3 with one bucket, and point fsspec to it."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.s3_server"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        before = {name: os.environ.get(name) for name in SETTINGS}
        try:
            timer = threading.Timer(_ANSWER_S, process.kill)
            timer.start()
            url = process.stdout.readline().strip()
            timer.cancel()
            assert url, "the server did not start"
            os.environ.update(
                zip(SETTINGS, ("key-of-the-test", SECRET, url, "us-east-1"), strict=True)
            )
            import s3fs

            s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET)
            yield Server(url)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            process.kill()


class _Faults:
    """Application in front of the server's: it fails requests as told, and notes all of them."""

    def __init__(self, served: Callable[..., Any]) -> None:
        self._served = served
        self._lock = threading.Lock()
        self._plans: list[dict[str, Any]] = []
        self._noted: list[dict[str, Any]] = []

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path.startswith("/_test/"):
            return self._told(environ, path, start)
        entry = {"method": method, "path": path, "sent": 0, "kind": self._kind(method, path)}
        with self._lock:
            self._noted.append(entry)
        if entry["kind"] is None:
            content = b"".join(self._served(environ, start))
            entry["sent"] = len(content)
            return [content]
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if entry["kind"] == "hang":
            threading.Event().wait(_HANG_S)
        if entry["kind"] in ("hang", "reset"):
            connection = environ["werkzeug.socket"]
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            raise ConnectionAbortedError
        status, code = entry["kind"].split()
        start(f"{status} {code}", [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>{code} as told</Message></Error>".encode()]

    def _kind(self, method: str, path: str) -> str | None:
        with self._lock:
            for plan in self._plans:
                if plan["count"] and plan["method"] == method and re.search(plan["path"], path):
                    plan["count"] -= 1
                    return str(plan["kind"])
        return None

    def _told(self, environ: dict[str, Any], path: str, start: Callable[..., Any]) -> list[bytes]:
        content = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        with self._lock:
            answer = [*self._noted]
            if path.endswith("fail"):
                self._plans = [content]
            else:
                self._noted.clear()
        start("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(answer).encode()]


def main() -> None:
    """Serve until the process is killed."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = _Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    print(f"http://127.0.0.1:{server.port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
