"""Output after its reader has closed."""

import os
import pty
import subprocess
import sys
import time

import pytest

WRITES = """
import sys
from lightning_ptdp.base.output import say, survive_closed_output
if sys.argv[1] == "survives":
    survive_closed_output()
sys.stdin.readline()  # the reader has gone
for _ in range(3):
    {write}
open(sys.argv[2], "w").write("the end")
"""


def run_without_reader(write, mode, file, output):
    """Run a program whose standard output has no reader.

    ``output`` is the write end.
    """
    program = [sys.executable, "-c", WRITES.format(write=write), mode, file]
    process = subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.PIPE
    )
    os.close(output)
    process.communicate(b"go\n", timeout=60)


@pytest.mark.parametrize(
    ("write", "mode"),
    [
        ("print('x' * 100000)", "survives"),
        ("print('x', flush=True)", "survives"),
        ("say('x')", "plain"),
    ],
)
def test_closed_pipe_does_not_end_program(write, mode, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    run_without_reader(write, mode, f"{tmp_path}/end", writer)
    assert os.path.exists(f"{tmp_path}/end")


def test_lost_terminal_does_not_end_program(tmp_path):
    ours, theirs = pty.openpty()
    os.close(ours)
    run_without_reader("print('x' * 100000)", "survives", f"{tmp_path}/end", theirs)
    assert os.path.exists(f"{tmp_path}/end")


def test_slow_reader_of_non_blocking_output_gets_all():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    code = (
        "from lightning_ptdp.base.output import survive_closed_output\n"
        "survive_closed_output()\n"
        "for _ in range(300): print('x' * 999, flush=True)"
    )
    with (
        subprocess.Popen([sys.executable, "-c", code], stdout=writer),
        open(reader, "rb") as stream,
    ):
        os.close(writer)
        time.sleep(1.0)
        assert len(stream.read()) == 300_000


def test_closed_pipe_ends_unprotected_program(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    run_without_reader("print('x' * 100000)", "plain", f"{tmp_path}/end", writer)
    assert not os.path.exists(f"{tmp_path}/end")


def test_unencodable_characters_are_replaced():
    code = "from lightning_ptdp.base.output import say, survive_closed_output\n{first}say('5 × ü')"
    for first in ("", "survive_closed_output()\n"):
        done = subprocess.run(
            [sys.executable, "-c", code.format(first=first)],
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            timeout=60,
            check=True,
        )
        assert done.stdout == b"5 ? ?\n"
