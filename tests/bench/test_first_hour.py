"""First-hour benchmark: one case without a GPU, and the page of all cases."""

import importlib
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough


@pytest.fixture
def hour(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "ci" / "benchmarks"))
    return importlib.import_module("first_hour")


def test_case_runs_in_own_process_with_time_limit(hour):
    found = hour.run("layouts", "one, m4", 200.0, on_gpu=False)
    losses = found["losses"]
    assert len(losses) == hour.STEPS and losses[-1] < losses[0], found
    assert hour.run("layouts", "one, m4", 0.1, on_gpu=False)["failed"] == "over 0 s"
    failed = hour.run("layouts", "no such layout", 200.0, on_gpu=False)
    assert failed["failed"] == "exit code 1" and "KeyError" in failed["output"]


def test_page_lists_every_case_and_omissions(hour, tmp_path, monkeypatch):
    def run(part, name, limit_s, *, on_gpu):
        return {"losses": [2.0, 1.0 if on_gpu else 1.25]} if part == "layouts" else {"seen": name}

    monkeypatch.setattr(hour, "run", run)
    monkeypatch.setattr(hour.torch.cuda, "get_device_name", lambda: "some GPU")
    found = hour.first_hour(tmp_path, gpus=2, budget_s=1000.0)
    assert json.loads((tmp_path / "first-hour.json").read_text()) == found
    assert found["layouts"]["t2"]["difference from a CPU"] == pytest.approx(0.2)
    assert found["layouts"]["t2 p2"] == {"left out": "needs 4 GPUs"}
    row = {"name": "x", "ours": 1.0, "peer": 2.0, "peer_name": "y", "ratio": 0.5, "unit": "s"}
    text = hour.page({**found, "models": [row]})
    assert "2 x some GPU" in text and "| x | 1 s | 2, y | 0.500 |" in text
    assert all(f"| {name} | " in text for _, names, _ in hour.PARTS.values() for name in names)
    spent = hour.first_hour(tmp_path, gpus=0, budget_s=0.0)
    assert spent["layouts"]["one, m4"] == {"left out": "the budget is spent"}
    assert spent["layouts"]["d2"] == {"left out": "needs 2 GPUs"}
