"""GPU benchmark with toy sizes on a CPU, and the report of its measurements."""

import importlib
import json
from pathlib import Path

import pytest

from tests.scripts import run_script

pytestmark = pytest.mark.thorough

BENCHMARKS = Path(__file__).parents[2] / "ci" / "benchmarks"
ABSENT = {"litdata", "mlflow", "sentencepiece", "peft"}
# The process from which tests fork has imported the package, but none of the absent ones.
ALONE = f"""
import runpy, sys
assert not sys.modules.keys() & {ABSENT}
sys.modules.update(dict.fromkeys({ABSENT}))
sys.path.insert(0, {str(BENCHMARKS)!r})
runpy.run_path({str(BENCHMARKS / "gpu.py")!r}, run_name="__main__")
"""


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_every_engine_runs_without_gpu_and_optional_packages(tmp_path):
    wanted = (
        "124M s=1024,|175B, a rank of t8 p12, sp|BERT-large s=512, ptdp|3B s=2048, ptdp|"
        "LoRA 8B s=2048|m=4, lightning|host"
    )
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    options = ["--toy", "--only", wanted, "--set", "bucket_mb=1", "--set", "no_such_option=1"]
    done = run_script(script, options)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    table = [line for line in lines if line.startswith(("GPT", "175B", "BERT", "Llama", "LoRA"))]
    measured = {line.partition("  ")[0] for line in table if "left out" not in line}
    assert not [line for line in table if "failed" in line or "not run" in line]
    left_out = {line.partition("  ")[0] for line in table if "left out" in line}
    assert {
        "LoRA 8B s=2048, ptdp-hf",
        "LoRA 8B s=2048, hf",
        "GPT-2 124M s=1024, ptdp no_such_option=1",
    } <= left_out
    assert all(job.startswith("LoRA") or "=" in job.rpartition(", ")[2] for job in left_out)
    engines = (
        "ptdp",
        "ptdp compile=blocks",
        "ptdp bucket_mb=1",
        "hf",
        "hf-compiled",
        "lightning",
        "ptdp-hf",
    )
    assert {f"GPT-2 124M s=1024, {engine}" for engine in engines} <= measured
    assert "175B, a rank of t8 p12, sp, slice" in measured
    rows = json.loads(lines[-1])
    assert {row["peer_name"] for row in rows if row["name"] == "GPT-2 124M s=1024, ptdp"} == {
        "plain Lightning, same module",
        "Hugging Face, plain loop",
        "Hugging Face, torch.compile",
    }
    assert sum(row["name"].startswith("host, a microbatch: ") for row in rows) == 4
    assert all(row.keys() == {"name", "ours", "peer", "peer_name", "ratio", "unit"} for row in rows)


def test_cases_over_budget_are_reported_as_not_run(module):
    gpu, cases = module("gpu"), module("gpu_cases")
    todo = list(cases.jobs(cases.CASES[:1]))
    found = list(gpu.measure_all(todo, 1.0, False, None))
    assert [job for job, _ in found] == todo
    assert {said for _, said in found} == {"not run: the budget is spent"}


def test_flops_match_published_formulas(module):
    cases = module("gpu_cases")
    by_name = {case.name: case for case in cases.CASES}
    whole = by_name["175B, a rank of t8 p12"]
    b, s, h, layers = whole.microbatches * whole.samples, 2048, 12288, 8
    # arXiv 2104.04473, section 5.1, without the head, with full recomputation.
    causal, full = cases.flops(whole)
    # two forwards, and a backward that costs two: half of 4 s^2 h each
    assert full - causal == b * 4 * 2 * s**2 * h * layers / 8
    assert full == pytest.approx(96 * b * s * layers * h**2 * (1 + s / (6 * h)) / 8, rel=1e-12)
    causal, full = cases.flops(by_name["GPT-2 124M s=1024"])
    # half of forward and backward, 3 * 4 s^2 h per layer
    assert full - causal == 16 * 6 * 1024**2 * 768 * 12
    bert = cases.flops(by_name["BERT-large s=512"])
    assert bert[0] == bert[1]
    lora = by_name["LoRA 8B s=2048"]
    assert cases.flops(lora)[1] == pytest.approx(
        lora.samples * (cases.flops_per_sample(lora.config) * 2 / 3 + 4 * 2048**2 * 4096 * 32),
        rel=1e-9,
    )


def test_idle_share_counts_time_without_kernels(module):
    idle_share = module("gpu_measure").idle_share
    spans = [
        ("kernel", 10, 20),
        ("gpu_memcpy", 15, 10),
        ("kernel", 50, 10),
        ("gpu_user_annotation", 0, 99),
        ("kernel", 52, 2),
    ]
    events = [{"cat": kind, "ts": ts, "dur": dur} for kind, ts, dur in spans]
    assert idle_share([*events, {"ph": "M"}]) == pytest.approx(1 - 30 / 50)
    assert idle_share([{"cat": "cpu_op", "ts": 0, "dur": 1}]) is None


def test_rows_compare_with_measured_peers_and_paper(module):
    gpu, cases, measure = (module(name) for name in ("gpu", "gpu_cases", "gpu_measure"))
    slice_, small = cases.CASES[2], cases.CASES[0]
    lora = next(case for case in cases.CASES if case.name == "LoRA 8B s=4096")

    def job(case, engine, seconds, **options):
        one = measure.Measured(seconds=(seconds,) * 3, peak_bytes=2**30, idle=0.1, parameters=1)
        return cases.Job(case=case, engine=engine, options=options), one

    peak = 989e12
    machine = gpu.Machine("NVIDIA H100 80GB HBM3", peak)
    at_papers_share = cases.flops(slice_)[1] / (153 / 312 * peak)
    found = [
        job(small, "ptdp", 1.0),
        job(small, "ptdp", 0.5, fp8="rowwise"),
        job(small, "hf", 2.0),
        job(slice_, "slice", at_papers_share / 2),
        job(lora, "ptdp-hf", 2 * 4096 / 12_473 / 2),
    ]
    rows = {(row.name, row.peer_name): row.ratio for row in gpu.rows(found, machine)}
    assert rows["GPT-2 124M s=1024, ptdp", "Hugging Face, plain loop"] == 0.5
    assert rows["GPT-2 124M s=1024, ptdp fp8=rowwise", "ours without the option"] == 0.5
    assert rows["GPT-2 124M s=1024, ptdp, memory", "Hugging Face, plain loop"] == 1.0
    assert rows[
        "175B, a rank of t8 p12, slice", "49% of the peak, as A100 in whole runs (arXiv 2104.04473)"
    ] == pytest.approx(0.5)
    published = "NeMo AutoModel, published: 12,473 tokens/s"
    assert rows["LoRA 8B s=4096, ptdp-hf", published] == pytest.approx(0.5)
    assert "98.1%" in gpu.line(*found[3], machine)
