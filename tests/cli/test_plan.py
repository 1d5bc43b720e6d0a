"""``ptdp plan``."""

import ast
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Callable

import huggingface_hub
import pytest
import torch
import transformers
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.cli.config_files import resolve_config
from lightning_ptdp.models import GPTConfig, pretrained_folder
from lightning_ptdp.models.adapters import LoraOptions
from lightning_ptdp.models.tiny import TINY_SIZES, make_tiny
from lightning_ptdp.planner import Job, find_device, search
from lightning_ptdp.planner.picture import draw, draw_what_if

pytestmark = pytest.mark.thorough

Run = Callable[..., tuple[int, str, str]]

SIZES = ["--layers", "24", "--hidden", "2048", "--heads", "16", "--sequence", "2048"]


def test_plan_of_recipe_lists_layouts_and_explains(ptdp):
    code, out, err = ptdp(
        "plan", "--recipe", "gpt/nano", "--world", "8", "--device", "cpu", "--top", "3", "--explain"
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "1.9 M parameters, 8 x cpu, batch 32 x 128 tokens, 32-true"
    assert (
        " ".join(lines[2].split())
        == "layout b m schedule recompute shard step s TFLOP/s MFU bubble memory GiB"
    )
    assert [line.split()[0] for line in lines[3:6]] == ["1", "2", "3"]
    assert "memory of the fullest rank of 1" in out
    assert "t8: num_heads=4 is not divisible by it" in out
    assert "times the time of the best" in out


def test_half_states_take_half_of_memory_and_offloaded_ones_none(ptdp, tmp_path):
    half_states, offloading = tmp_path / "half.yaml", tmp_path / "offload.yaml"
    half_states.write_text("base: gpt/nano\nmodel: {init_args: {optimizer: {states: bfloat16}}}\n")
    offloading.write_text(
        "base: gpt/nano\ntrainer: {strategy: {init_args: {offload_optimizer: true}}}\n"
    )
    plans = []
    for config in ("gpt/nano", str(half_states), str(offloading)):
        options = ["--world", "2", "--device", "cpu", "--top", "1", "--json"]
        code, out, err = ptdp("plan", "--config", config, *options)
        assert code == 0, err
        plans.append(json.loads(out)["best"][0]["memory"])
    full, half, offloaded = plans
    assert offloaded == {**full, "optimizer": 0, "total": full["total"] - full["optimizer"]}
    assert half["optimizer"] == full["optimizer"] / 2 == 4 * half["parameters"]
    assert half["weights"] == full["weights"]


def test_printed_strategy_call_is_valid(ptdp):
    _, out, _ = ptdp(
        "plan",
        *SIZES,
        "--world",
        "64",
        "--batch",
        "128",
        "--tp",
        "4",
        "--pp",
        "4",
        "--recompute",
        "full",
    )
    line = next(
        line.strip() for line in out.splitlines() if line.strip().startswith("PTDPStrategy(")
    )
    call = ast.parse(line, mode="eval").body
    options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert (
        options["tensor_parallel_size"],
        options["pipeline_parallel_size"],
        options["recompute"],
    ) == (4, 4, "full")
    assert PTDPStrategy(**options).config.layout(64).data_parallel_size == 4


def test_printed_fit_options_replace_layout_of_base(ptdp, tmp_path):
    code, out, _ = ptdp(
        "plan", *SIZES, "--world", "4", "--batch", "16", "--tp", "1", "--pp", "2", "--vpp", "1"
    )
    assert code == 0
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("with ptdp fit"))
    path = tmp_path / "mine.yaml"
    path.write_text("base: hf/nano\n" + "\n".join(line[2:] for line in lines[start + 1 :]))
    values = resolve_config(path).values
    trainer, data = values["trainer"], values["data"]["init_args"]
    assert trainer["devices"] * trainer["num_nodes"] == 4
    assert trainer["accumulate_grad_batches"] == 1
    strategy = PTDPStrategy(**trainer["strategy"]["init_args"])
    layout = strategy.config.layout(4)
    assert (layout.tensor_parallel_size, layout.pipeline_parallel_size) == (1, 2)
    assert data["num_microbatches"] == trainer["strategy"]["init_args"]["num_microbatches"]
    assert layout.data_parallel_size * data["micro_batch_size"] * data["num_microbatches"] == 16


def test_pictures_of_plan_and_what_if_are_written(ptdp, tmp_path):
    small = [*SIZES, "--world", "8", "--batch", "64", "--top", "3"]
    _, out, _ = ptdp("plan", *small, "--picture", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    bar = next(line for line in out.splitlines() if line.startswith("  1  c"))
    assert set(bar.split()[1]) <= set("ctbmgo")
    _, out, _ = ptdp(
        "plan", *small, "--what-if", "batch=64,128,gpus=8,16", "--picture", str(tmp_path / "b.png")
    )
    assert (tmp_path / "b.png").exists()
    rows = [line.split()[:2] for line in out.splitlines()[1:5]]
    assert rows == [["8", "64"], ["16", "64"], ["8", "128"], ["16", "128"]]


def test_picture_labels_do_not_overlap(tmp_path, monkeypatch):
    """Draw four batches of similar throughput on four world sizes, and both memory limits."""
    from matplotlib.figure import Figure

    drawn = []
    saved = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path: (drawn.append(figure), saved(figure, path))
    )
    job = Job(
        model=GPTConfig.gpt2(), world_size=8, global_batch_size=64, device=find_device("h100")
    )
    found = {}
    for batch in (64, 128, 256, 512):
        for world in (1, 2, 3, 4):
            one = dataclasses.replace(job, world_size=2**world, global_batch_size=batch)
            found.setdefault(batch, []).append((2**world, search(one, count=1).best[0]))
    draw_what_if(found, tmp_path / "a.png", tokens={batch: 1024 * batch for batch in found})
    draw(search(job, count=3), tmp_path / "b.png")
    what_if, plan = drawn
    what_if.draw_without_rendering()
    labels = [text.get_window_extent() for axes in what_if.axes for text in axes.texts]
    assert len(labels) == 16
    assert not [pair for pair in itertools.combinations(labels, 2) if pair[0].overlaps(pair[1])]
    _, memory = plan.axes
    limits = [line.get_xdata()[0] for line in memory.lines]
    assert limits == pytest.approx([job.limit_bytes / 2**30, job.device.usable_bytes / 2**30])
    assert memory.get_xlim()[1] > limits[1]


def test_plan_with_sharded_parameters_prints_no_strategy(ptdp):
    """A layout that fits only with sharded parameters would not fit in PTDPStrategy."""
    arguments = [*SIZES, "--world", "8", "--batch", "64", "--top", "1"]
    code, out, _ = ptdp("plan", *arguments, "--software", "fsdp2-fp8", "--recompute", "selective")
    assert code == 0
    assert out.splitlines()[0].endswith("bf16-true, fsdp2-fp8")
    assert (
        "PTDPStrategy(" not in out
        and "fsdp2-fp8 shards parameters in another way than shard='parameters'" in out
    )
    first = out.splitlines()[3].split()
    assert "selective" in first and first[first.index("selective") + 1] == "parameters"
    assert "less a reserve of 20%" in out and "| reserve" in out


def test_json_output(ptdp):
    code, out, _ = ptdp(
        "plan",
        *SIZES,
        "--llama",
        "--kv-heads",
        "4",
        "--world",
        "16",
        "--batch",
        "64",
        "--json",
        "--top",
        "2",
    )
    assert code == 0
    data = json.loads(out)
    assert data["job"]["world_size"] == 16
    assert len(data["best"]) == 2
    best = data["best"][0]
    parts = (
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "working",
        "communicators",
    )
    assert best["memory"]["total"] == pytest.approx(sum(best["memory"][name] for name in parts))
    assert 0 < best["mfu"] < 1
    assert data["rejected"] and {"what", "reason"} == set(data["rejected"][0])


def test_size_options_override_configuration(ptdp, tmp_path):
    config = {
        "trainer": {
            "devices": 8,
            "precision": "bf16-mixed",
            "accumulate_grad_batches": 3,
            "strategy": {
                "class_path": "lightning_ptdp.PTDPStrategy",
                "init_args": {"tensor_parallel_size": 2},
            },
        },
        "model": {
            "class_path": "LitGPT",
            "init_args": {"config": {"num_layers": 2, "hidden_size": 64, "num_heads": 4}},
        },
        "data": {
            "class_path": "TextDataModule",
            "init_args": {"sequence_length": 256, "micro_batch_size": 2, "num_microbatches": 5},
        },
    }
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(config))
    _, out, _ = ptdp("plan", "--config", str(path), "--world", "4")
    assert "4 x h100-80gb, batch 120 x 256 tokens, bf16-mixed" in out.splitlines()[0]
    config["data"]["init_args"] |= {"global_batch_size": 160}
    path.write_text(yaml.safe_dump(config))
    _, out, _ = ptdp("plan", "--config", str(path), "--world", "4")
    assert "batch 480 x 256 tokens" in out.splitlines()[0]
    _, wider, _ = ptdp(
        "plan", "--config", str(path), "--world", "4", "--hidden", "4096", "--batch", "32"
    )
    assert wider.split()[:2] == ["612.8", "M"]
    assert "batch 32 x" in wider.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--world", "8"],
            "there is no model. Use --recipe, --config or --model, or also set --layers, --hidden, "
            "--heads, --sequence",
        ),
        ([*SIZES, "--world", "8"], "Set --batch"),
        (["--recipe", "gpt/nan", "--world", "8"], "did you mean 'gpt/nano'"),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--device", "h300"],
            "device='h300' is unknown. Did you mean 'h200'",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--precision", "bf16-tru"],
            "Did you mean 'bf16-true'",
        ),
        ([*SIZES, "--world", "8", "--batch", "8", "--schedule", "1f1"], "schedules has '1f1'"),
        (
            [*SIZES, "--world", "0", "--batch", "8"],
            "argument --world: '0' is not a positive integer",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--heads", "7"],
            "hidden_size=2048 is not divisible by num_heads=7",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--memory", "1"],
            "8 x h100-80gb with 0.8 GiB (1 less a reserve of 20%) each. ",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--memory", "1", "--reserve", "0"],
            "on 8 x h100-80gb with 1 GiB each. ",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--memory", "3.2"],
            "with --reserve 0.07 it fits, if the estimate is exact",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--reserve", "1"],
            "reserve=1.0 must be a share of the memory",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--memory", "1"],
            " of these devices would be enough",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--memory", "4.5", "--tp", "1", "--pp", "1"],
            "without the restrictions ",
        ),
        (
            [*SIZES, "--world", "7", "--batch", "8", "--pp", "2"],
            "no layout divides 7 devices and a batch of 8: t1 c1 p2: it does not",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "9", "--tp", "1", "--pp", "1"],
            "Use --batch 16 or --world 3",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--what-if", "cpus=3"],
            "Give numbers of batch or gpus",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--picture", "/nowhere/x.png"],
            "--picture /nowhere/x.png: /nowhere does not exist",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--tp", "x"],
            "argument --tp: 'x' is not a positive integer",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--tp", ""],
            "argument --tp: '' is not a positive integer",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--top", "0"],
            "argument --top: '0' is not a positive integer",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--what-if", "gpus=0"],
            "Give numbers of batch or gpus",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--what-if", ""],
            "Give numbers of batch or gpus",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--memory", "-3"],
            "--memory -3 is not a valid amount of memory",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--json", "--picture", "a.png"],
            "Leave out --picture and --what-if",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--explain", "--what-if", "gpus=8"],
            "Leave out --what-if",
        ),
        (
            ["--recipe", "gpt/nano", "--llama", "--world", "8"],
            "gpt/nano determines the model. Leave out one of them",
        ),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--cp-attention", "rings"],
            "context_parallel_attentions=",
        ),
        ([*SIZES, "--world", "8", "--batch", "8", "--software", "our"], "Did you mean 'ours'"),
        (
            [*SIZES, "--world", "8", "--batch", "8", "--software", "fsdp2-fp8", "--device", "a100"],
            "the float8 rate of a100-80gb is unknown",
        ),
        ([*SIZES, "--batch", "8"], "--world"),
    ],
)
def test_invalid_option_is_refused(ptdp, arguments, words):
    code, _, err = ptdp("plan", *arguments)
    assert code == 2
    assert words in err


def test_batch_follows_from_known_number_of_devices_only(ptdp, tmp_path):
    path = tmp_path / "mine.yaml"
    arguments = ("plan", "--config", str(path), "--world", "8", "--device", "cpu", "--top", "1")
    path.write_text("base: gpt/nano\ntrainer: {devices: [0, 1, 2, 3, 4, 5, 6, 7]}")
    _, out, _ = ptdp(*arguments)
    assert "batch 64 x" in out.splitlines()[0]
    path.write_text("base: gpt/nano\ntrainer: {devices: auto}")
    code, _, err = ptdp(*arguments)
    assert code == 2
    assert "trainer.devices=auto does not give the number of replicas. Set --batch" in err


def test_bert_recipe_is_planned(ptdp):
    arguments = ("plan", "--recipe", "bert/nano", "--world", "4", "--device", "cpu")
    code, out, _ = ptdp(*arguments)
    assert code == 0
    assert "4 x cpu, batch" in out
    code, _, err = ptdp(*arguments, "--experts", "4")
    assert code == 2
    assert "num_experts is not a size of a BERT" in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2", "is not YAML"),
        ("3", "mine.yaml"),
        ("trainer: {}", "has no model.init_args.config"),
        (
            "model: {init_args: {config: {num_layer: 3}}}",
            "model.config.num_layer is not a size of a GPT; did you mean 'num_layers'",
        ),
    ],
)
def test_file_without_valid_model_is_refused(ptdp, tmp_path, text, words):
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
GPT2 = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
}


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
def test_hugging_face_model_is_planned(ptdp, tmp_path, config, size):
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--world", "64", "--batch", "64", "--sequence", "512", "--pp", "1,2"]
    _, out, _ = ptdp("plan", "--model", str(tmp_path), *arguments)
    assert out.startswith(size)
    file = tmp_path / "mine.yaml"
    file.write_text(
        yaml.safe_dump(
            {"model": {"class_path": "LitCausalLM", "init_args": {"path": str(tmp_path)}}}
        )
    )
    assert ptdp("plan", "--config", str(file), *arguments)[1] == out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"num_local_experts": 8},
            "num_experts=8, but the number of active experts per token is unknown",
        ),
        (
            {"num_local_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
            "decoder_sparse_step=2 is not supported",
        ),
        (
            {"layer_types": ["linear_attention"]},
            "its layers are not all attention (linear_attention)",
        ),
        ({"vocab_size": None}, "has no vocab_size"),
        (
            None,
            "has no config.json. Give the folder that save_pretrained wrote. Or give the sizes as "
            "options",
        ),
    ],
)
def test_unsupported_hugging_face_model_is_refused(ptdp, tmp_path, changes, words):
    if changes is not None:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    code, _, err = ptdp("plan", "--model", str(tmp_path), "--world", "8", "--batch", "16")
    assert code == 2 and words in err


@pytest.mark.parametrize("recipe", ["nano", "sft", "lora", "continue"])
def test_hugging_face_recipe_is_planned(ptdp, tmp_path, monkeypatch, recipe):
    """The plan uses the default model of the recipe without creating its folder."""
    monkeypatch.chdir(tmp_path)
    code, out, err = ptdp(
        "plan", "--recipe", f"hf/{recipe}", "--world", "4", "--top", "1", "--json"
    )
    assert (code, err) == (0, "")
    job = json.loads(out)["job"]
    assert job["sequence_length"] == (256 if recipe == "continue" else 128)
    assert list(tmp_path.iterdir()) == []
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY_SIZES))
    assert job["parameters"] == model.num_parameters()
    if recipe == "lora":
        trained = model.num_parameters() * job["trained"]
        LoraOptions(r=8).inject(model)
        assert trained == pytest.approx(model.num_parameters(only_trainable=True), rel=0.3)
    else:
        assert job["trained"] == 1


def test_tiny_model_has_equal_plan_before_and_after_creation(ptdp, tmp_path):
    given = ["--world", "2", "--batch", "8", "--sequence", "64", "--json"]
    sizes = ptdp("plan", "--model", f"tiny:{tmp_path / 'tiny'}", *given)[1]
    make_tiny(tmp_path / "tiny")
    assert ptdp("plan", "--model", f"tiny:{tmp_path / 'tiny'}", *given)[1] == sizes
    assert ptdp("plan", "--model", str(tmp_path / "tiny"), *given)[1] == sizes


def test_adapters_reduce_memory_and_time(ptdp, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = tmp_path / "mine.yaml"
    found = []
    for adapter in (None, {"r": 16}):
        model = {
            "class_path": "LitCausalLM",
            "init_args": {"path": str(tmp_path), "adapter": adapter},
        }
        file.write_text(yaml.safe_dump({"model": model}))
        layout = [
            "--tp",
            "2",
            "--pp",
            "4",
            "--schedule",
            "1f1b",
            "--recompute",
            "full",
            "--shard",
            "none",
        ]
        arguments = ["--world", "8", "--batch", "32", "--micro-batch", "1", *layout]
        found.append(
            json.loads(ptdp("plan", "--config", str(file), *arguments, "--json")[1])["best"][0]
        )
    whole, adapted = found
    # 14 of 16 bytes per parameter are gradients and optimizer state.
    assert (
        adapted["memory"]["optimizer"] + adapted["memory"]["gradients"]
        < 0.02 * whole["memory"]["optimizer"]
    )
    # now of another rank, which uses the most memory
    assert adapted["memory"]["weights"] > 0.75 * whole["memory"]["weights"]
    assert 0.7 * whole["time"]["total"] < adapted["time"]["total"] < 0.9 * whole["time"]["total"]
    assert adapted["mfu"] == pytest.approx(whole["mfu"], rel=0.15)


def test_unreachable_hub_is_reported_after_timeout(ptdp, monkeypatch):
    """A connection without an answer ends in a one-line error that names the fix."""
    started, ended = threading.Event(), threading.Event()

    def hangs(name, file, *, local_files_only=False, etag_timeout=10):
        if local_files_only:
            raise LocalEntryNotFoundError("not there")
        started.set()
        ended.wait()
        raise OSError("ended")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hangs)
    monkeypatch.setattr(pretrained_folder, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for arguments in (["--model", "org/model"], ["--recipe", "hf/llama-3-8b"]):
        began = time.perf_counter()
        code, _, err = ptdp("plan", *arguments, "--world", "8", "--batch", "8")
        assert time.perf_counter() - began < 20
        assert code == 2 and started.is_set() and len(err.splitlines()) == 1
        assert (
            "is not a folder, and the config.json of this model on the hub is not in the cache and "
            "could not be downloaded (TimeoutError)" in err
        )
        assert "Run hf download " in err and "--layers 24" in err
    ended.set()


def test_mixture_of_experts_is_planned(ptdp, tmp_path):
    """Check ``ptdp plan`` for given sizes of a mixture of experts and given degrees.

    The printed ``PTDPStrategy(...)`` can be pasted into code. An imbalance slows the experts.
    A degree that does not divide the number of experts is an error.
    """
    sizes = [
        "--layers",
        "32",
        "--hidden",
        "4096",
        "--heads",
        "32",
        "--kv-heads",
        "8",
        "--ffn",
        "14336",
        "--sequence",
        "4096",
    ]
    arguments = [
        "plan",
        *sizes,
        "--experts",
        "8",
        "--world",
        "64",
        "--batch",
        "256",
        "--pp",
        "4",
        "--ep",
        "4,8",
    ]
    code, out, _ = ptdp(*arguments, "--picture", str(tmp_path / "plan.png"))
    assert code == 0 and (tmp_path / "plan.png").stat().st_size > 0
    line = next(
        line.strip() for line in out.splitlines() if line.strip().startswith("PTDPStrategy(")
    )
    options = {
        keyword.arg: ast.literal_eval(keyword.value)
        for keyword in ast.parse(line, mode="eval").body.keywords
    }
    assert (
        options["expert_parallel_size"] in (4, 8)
        and PTDPStrategy(**options).config.layout(64).data_parallel_size == 16
    )
    assert "experts" in out.partition("step time of 1")[2] and "d dispatch" in out
    found = json.loads(ptdp(*arguments, "--json")[1])
    assert found["job"]["active_parameters"] < found["job"]["parameters"] / 3
    assert found["best"][0]["time"]["dispatch"] > 0
    slower = json.loads(ptdp(*arguments, "--json", "--imbalance", "1.5")[1])
    assert slower["best"][0]["time"]["experts"] > 1.2 * found["best"][0]["time"]["experts"]
    code, _, err = ptdp(*arguments[:-1], "3")
    assert code == 2 and "e3: num_experts=8 is not divisible by it" in err


def test_custom_module_of_configuration_is_planned(ptdp, tmp_path):
    path = tmp_path / "mine.yaml"
    model = {"class_path": "tests.planner.test_trace.Lit", "init_args": {}}
    path.write_text(yaml.safe_dump({"model": model, "trainer": {"devices": 2}}))
    code, out, err = ptdp(
        "plan", "--config", str(path), "--world", "8", "--batch", "16", "--device", "a100"
    )
    assert (code, err) == (0, "")
    assert "8 x a100" in out.splitlines()[0] and "batch 16 x 24 tokens" in out.splitlines()[0]
    model["init_args"] = {"frozen": True}
    path.write_text(yaml.safe_dump({"model": model}))
    arguments = ["--config", str(path), "--world", "1", "--batch", "16", "--json"]
    assert 0 < json.loads(ptdp("plan", *arguments)[1])["job"]["trained"] < 1
    model["class_path"] = "tests.planner.test_trace.Absent"
    path.write_text(yaml.safe_dump({"model": model}))
    code, _, err = ptdp("plan", "--config", str(path), "--world", "8", "--batch", "16")
    assert code == 2
    assert "tests.planner.test_trace.Absent cannot be built without values: " in err
    sizes = [
        "--layers",
        "4",
        "--hidden",
        "64",
        "--heads",
        "4",
        "--sequence",
        "64",
        "--vocabulary",
        "128",
    ]
    assert ptdp("plan", "--config", str(path), *sizes, "--world", "8", "--batch", "16")[0] == 0
