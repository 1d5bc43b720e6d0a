"""``ptdp plan``."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.cli.inheritance import resolve_config

Run = Callable[..., tuple[int, str, str]]

SIZES = ["--layers", "24", "--hidden", "2048", "--heads", "16", "--sequence", "2048"]


def test_a_recipe(ptdp: Run) -> None:
    code, out, err = ptdp("plan", "--recipe", "gpt/nano", "--world", "8", "--device", "cpu", "--top", "3", "--explain")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "1.9 M parameters, 8 x cpu, batch 32 x 128 tokens, 32-true"
    assert " ".join(lines[2].split()) == "layout b m schedule recompute ZeRO step s TFLOP/s MFU bubble memory GiB"
    assert [line.split()[0] for line in lines[3:6]] == ["1", "2", "3"]
    assert "memory of the fullest rank of 1" in out
    assert "t8: num_heads=4 is not divisible by it" in out
    assert "times as long as the best" in out


def test_what_is_printed_can_be_pasted(ptdp: Run) -> None:
    _, out, _ = ptdp("plan", *SIZES, "--world", "64", "--batch", "128", "--tp", "4", "--pp", "4", "--recompute", "full")
    line = next(line.strip() for line in out.splitlines() if line.strip().startswith("PTDPStrategy("))
    call = ast.parse(line, mode="eval").body
    options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert (options["tensor_parallel_size"], options["pipeline_parallel_size"], options["recompute"]) == (4, 4, "full")
    assert PTDPStrategy(**options).config.layout(64).data_parallel_size == 4


def test_what_is_printed_for_fit_works_as_it_is(ptdp: Run, tmp_path: Path) -> None:
    """On a file that says otherwise: nothing of its layout is left."""
    code, out, _ = ptdp("plan", *SIZES, "--world", "4", "--batch", "16", "--tp", "1", "--pp", "2", "--vpp", "1")
    assert code == 0
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("with ptdp fit"))
    path = tmp_path / "mine.yaml"
    path.write_text("base: hf/nano\n" + "\n".join(line[2:] for line in lines[start + 1 :]))
    values = resolve_config(path).values
    trainer, data = values["trainer"], values["data"]["init_args"]
    assert trainer["devices"] * trainer["num_nodes"] == 4
    strategy = PTDPStrategy(**trainer["strategy"]["init_args"])
    layout = strategy.config.layout(4)
    assert (layout.tensor_parallel_size, layout.pipeline_parallel_size) == (1, 2)
    assert data["num_microbatches"] == trainer["strategy"]["init_args"]["num_microbatches"]
    assert layout.data_parallel_size * data["micro_batch_size"] * data["num_microbatches"] == 16


def test_pictures(ptdp: Run, tmp_path: Path) -> None:
    small = [*SIZES, "--world", "8", "--batch", "64", "--top", "3"]
    _, out, _ = ptdp("plan", *small, "--picture", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    bar = next(line for line in out.splitlines() if line.startswith("  1  c"))
    assert set(bar.split()[1]) <= set("ctbmgo")
    _, out, _ = ptdp("plan", *small, "--what-if", "batch=64,128,gpus=8,16", "--picture", str(tmp_path / "b.png"))
    assert (tmp_path / "b.png").exists()
    rows = [line.split()[:2] for line in out.splitlines()[1:5]]
    assert rows == [["8", "64"], ["16", "64"], ["8", "128"], ["16", "128"]]


def test_json(ptdp: Run) -> None:
    code, out, _ = ptdp("plan", *SIZES, "--llama", "--kv-heads", "4", "--world", "16", "--batch", "64", "--json", "--top", "2")
    assert code == 0
    data = json.loads(out)
    assert data["job"]["world_size"] == 16
    assert len(data["best"]) == 2
    best = data["best"][0]
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "working")
    assert best["memory"]["total"] == pytest.approx(sum(best["memory"][name] for name in parts))
    assert 0 < best["mfu"] < 1
    assert data["rejected"] and {"what", "reason"} == set(data["rejected"][0])


def test_sizes_change_those_of_a_file(ptdp: Run, tmp_path: Path) -> None:
    config = {
        "trainer": {
            "devices": 8,
            "precision": "bf16-mixed",
            "accumulate_grad_batches": 3,
            "strategy": {"class_path": "lightning_ptdp.PTDPStrategy", "init_args": {"tensor_parallel_size": 2}},
        },
        "model": {"class_path": "LitGPT", "init_args": {"config": {"num_layers": 2, "hidden_size": 64, "num_heads": 4}}},
        "data": {
            "class_path": "TextDataModule",
            "init_args": {"sequence_length": 256, "micro_batch_size": 2, "num_microbatches": 5},
        },
    }
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(config))
    _, out, _ = ptdp("plan", "--config", str(path), "--world", "4")
    assert "4 x h100-80gb, batch 120 x 256 tokens, bf16-mixed" in out.splitlines()[0]
    _, wider, _ = ptdp("plan", "--config", str(path), "--world", "4", "--hidden", "4096", "--batch", "32")
    assert wider.split()[:2] == ["612.8", "M"]
    assert "batch 32 x" in wider.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--world", "8"],
            "there is no model: give --recipe, --config or --model, or also --layers, --hidden, --heads, --sequence",
        ),
        ([*SIZES, "--world", "8"], "Give --batch"),
        (["--recipe", "gpt/nan", "--world", "8"], "did you mean 'gpt/nano'"),
        ([*SIZES, "--world", "8", "--batch", "8", "--device", "h300"], "device='h300' is unknown: did you mean 'h200'"),
        ([*SIZES, "--world", "8", "--batch", "8", "--precision", "bf16-tru"], "did you mean 'bf16-true'"),
        ([*SIZES, "--world", "8", "--batch", "8", "--schedule", "1f1"], "schedules holds '1f1'"),
        ([*SIZES, "--world", "0", "--batch", "8"], "world_size=0 must be a positive integer"),
        ([*SIZES, "--world", "8", "--batch", "8", "--heads", "7"], "hidden_size=2048 is not divisible by num_heads=7"),
        ([*SIZES, "--world", "8", "--batch", "8", "--memory", "1"], "no layout fits on 8 x h100-80gb with 1 GiB each: "),
        ([*SIZES, "--world", "8", "--batch", "8", "--memory", "1"], " of these devices would do"),
        ([*SIZES, "--world", "8", "--batch", "8", "--memory", "8", "--tp", "1", "--pp", "1"], "without the restrictions "),
        (
            [*SIZES, "--world", "7", "--batch", "8", "--pp", "2"],
            "no layout divides 7 devices and a batch of 8: t1 c1 p2: it does not",
        ),
        ([*SIZES, "--world", "8", "--batch", "9", "--tp", "1", "--pp", "1"], "use --batch 16 or --world 3"),
        ([*SIZES, "--world", "8", "--batch", "8", "--what-if", "cpus=3"], "write numbers of batch or gpus"),
        ([*SIZES, "--world", "8", "--batch", "8", "--picture", "/nowhere/x.png"], "--picture /nowhere/x.png cannot be written"),
        ([*SIZES, "--world", "8", "--batch", "8", "--tp", "x"], "--tp"),
        ([*SIZES, "--batch", "8"], "--world"),
    ],
)
def test_mistakes(ptdp: Run, arguments: list[str], words: str) -> None:
    code, _, err = ptdp("plan", *arguments)
    assert code == 2
    assert words in err


def test_a_bert_is_planned_as_a_gpt_of_its_sizes(ptdp: Run) -> None:
    code, out, err = ptdp("plan", "--recipe", "bert/nano", "--world", "4", "--device", "cpu")
    assert code == 0
    assert "4 x cpu, batch" in out
    assert "LitBert is planned as a GPT of the same sizes" in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2", "is not YAML"),
        ("3", "mine.yaml"),
        ("trainer: {}", "has no model.init_args.config"),
        (
            "model: {init_args: {config: {num_layer: 3}}}",
            "model.config.num_layer is not one of a GPT's sizes; did you mean 'num_layers'",
        ),
    ],
)
def test_files_that_hold_no_model(ptdp: Run, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    code, _, err = ptdp("plan", "--config", str(path), "--world", "8", "--batch", "8")
    assert code == 2
    assert words in err


LLAMA = {
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
MIXTRAL = {**LLAMA, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3 = {
    **LLAMA,
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GPT2 = {"vocab_size": 50257, "n_positions": 1024, "n_layer": 12, "n_embd": 768, "n_head": 12, "n_inner": None}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (LLAMA, "8.0 B"),
        (GPT2, "124.0 M"),
        (MIXTRAL, "46.7 B parameters, 12.9 B of them active"),
        (QWEN3, "30.5 B parameters, 3.4 B of them active"),  # 3.35, published as 3.3
    ],
    ids=["Llama 3 8B", "GPT-2", "Mixtral 8x7B", "Qwen3-30B-A3B"],
)
def test_a_model_of_hugging_faces(ptdp: Run, tmp_path: Path, config: dict[str, object], size: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--world", "64", "--batch", "64", "--sequence", "512", "--pp", "1,2"]
    _, out, _ = ptdp("plan", "--model", str(tmp_path), *arguments)
    assert out.startswith(size)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"model": {"class_path": "LitCausalLM", "init_args": {"path": str(tmp_path)}}}))
    assert ptdp("plan", "--config", str(file), *arguments)[1] == out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_local_experts": 8}, "num_experts=8, and nothing says how many of them a token visits"),
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2}, "decoder_sparse_step=2: experts in some"),
        ({"layer_types": ["linear_attention"]}, "its layers are not all attention (linear_attention)"),
        ({"vocab_size": None}, "has no vocab_size"),
        (None, "has no config.json of a Hugging Face model (FileNotFoundError): give the sizes"),
    ],
)
def test_models_that_are_not_planned(ptdp: Run, tmp_path: Path, changes: dict[str, object] | None, words: str) -> None:
    if changes is not None:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    code, _, err = ptdp("plan", "--model", str(tmp_path), "--world", "8", "--batch", "16")
    assert code == 2 and words in err


def test_experts(ptdp: Run, tmp_path: Path) -> None:
    """Of sizes that are given, with the degrees that are asked for; what is printed can be pasted."""
    sizes = ["--layers", "32", "--hidden", "4096", "--heads", "32", "--kv-heads", "8", "--ffn", "14336", "--sequence", "4096"]
    arguments = ["plan", *sizes, "--experts", "8", "--world", "64", "--batch", "256", "--pp", "4", "--ep", "4,8"]
    code, out, _ = ptdp(*arguments, "--picture", str(tmp_path / "plan.png"))
    assert code == 0 and (tmp_path / "plan.png").stat().st_size > 0
    line = next(line.strip() for line in out.splitlines() if line.strip().startswith("PTDPStrategy("))
    options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in ast.parse(line, mode="eval").body.keywords}
    assert options["expert_parallel_size"] in (4, 8) and PTDPStrategy(**options).config.layout(64).data_parallel_size == 16
    assert "experts" in out.partition("time of a step")[2] and "d dispatch" in out
    found = json.loads(ptdp(*arguments, "--json")[1])
    assert found["job"]["active_parameters"] < found["job"]["parameters"] / 3
    assert found["best"][0]["time"]["dispatch"] > 0
    slower = json.loads(ptdp(*arguments, "--json", "--imbalance", "1.5")[1])
    assert slower["best"][0]["time"]["experts"] > 1.2 * found["best"][0]["time"]["experts"]
    code, _, err = ptdp(*arguments[:-1], "3")
    assert code == 2 and "e3: num_experts=8 is not divisible by it" in err


def test_any_module_of_a_configuration(ptdp: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    model = {"class_path": "tests.planner.test_trace.Lit", "init_args": {}}
    path.write_text(yaml.safe_dump({"model": model, "trainer": {"devices": 2}}))
    code, out, err = ptdp("plan", "--config", str(path), "--world", "8", "--batch", "16", "--device", "a100")
    assert (code, err) == (0, "")
    assert "8 x a100" in out.splitlines()[0] and "batch 16 x 24 tokens" in out.splitlines()[0]
    model["class_path"] = "tests.planner.test_trace.Absent"
    path.write_text(yaml.safe_dump({"model": model}))
    code, _, err = ptdp("plan", "--config", str(path), "--world", "8", "--batch", "16")
    assert code == 2
    assert "tests.planner.test_trace.Absent cannot be built without values: " in err
    sizes = ["--layers", "4", "--hidden", "64", "--heads", "4", "--sequence", "64", "--vocabulary", "128"]
    assert ptdp("plan", "--config", str(path), *sizes, "--world", "8", "--batch", "16")[0] == 0
