"""Background saves complete, however the process ends (ci/endings.py runs more cases)."""

import json
import os
from pathlib import Path

import pytest

from tests.scripts import forked_session

PROGRAM = Path(__file__).parents[2] / "ci" / "endings.py"
# Several starts, each of which takes minutes on a busy machine.
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


@pytest.mark.parametrize("launcher", ["one", "ranks", "fork"])
def test_started_background_save_completes(launcher, tmp_path):
    with forked_session(
        [str(PROGRAM), "--runs", "4", "--launchers", launcher], folder=tmp_path
    ) as endings:
        assert endings.finish(550) == 0, endings.output
    assert "4 runs in" in endings.output


@pytest.mark.parametrize("way", ["Ctrl-C", "Ctrl-C to one"])
def test_ctrl_c_saves_checkpoint_under_lightnings_launcher(way, tmp_path):
    case = {
        "launcher": "popen",
        "way": way,
        "hook": "on_train_batch_end",
        "on_ranks": [1],
        "saves": True,
    }
    with forked_session(
        [str(PROGRAM), "--only", json.dumps(case), str(tmp_path)], folder=tmp_path
    ) as script:
        assert script.finish(400) == 1, script.output
    assert (
        "Ctrl-C: training saves after this step and ends" in script.output or way == "Ctrl-C to one"
    )
    assert f"Ctrl-C: saved {tmp_path}/on_signal.ckpt" in script.output
    assert {"begun.ckpt", "on_signal.ckpt"} <= set(os.listdir(tmp_path))
