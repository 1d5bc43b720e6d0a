"""Inheritance of configurations through ``base:``, and the origin of each value."""

import os

import pytest
import yaml

from lightning_ptdp.cli.config_files import resolve_config, resolve_configs
from lightning_ptdp.cli.failures import UserError

pytestmark = pytest.mark.thorough


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def merged(folder, base, over):
    write(folder / "base.yaml", base)
    return resolve_config(write(folder / "over.yaml", f"base: base.yaml\n{over}")).values


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        ("a: {b: 1, c: 2}", "a: {c: 3, d: 4}", {"a": {"b": 1, "c": 3, "d": 4}}),
        ("a: {b: {c: 1}}", "a: {b: null}", {"a": {"b": None}}),
        ("a: null", "a: {b: 1}", {"a": {"b": 1}}),
        ("a: {b: 1}", "a: {}", {"a": {"b": 1}}),
        ("a: [1, 2, {b: 3}]", "a: [4]", {"a": [4]}),
        ("a: [1, 2]", "a: []", {"a": []}),
        ("a: {b: 1}", "a: CSVLogger", {"a": "CSVLogger"}),
        ("a: 1", "", {"a": 1}),
        (
            "a: {class_path: x.A, init_args: {b: 1}}",
            "a: {init_args: {c: 2}}",
            {"a": {"class_path": "x.A", "init_args": {"b": 1, "c": 2}}},
        ),
        (
            "a: {class_path: x.A, init_args: {b: 1}}",
            "a: {class_path: A}",
            {"a": {"class_path": "A", "init_args": {"b": 1}}},
        ),
        (
            "a: {class_path: x.A, init_args: {b: 1}}",
            "a: {class_path: x.B}",
            {"a": {"class_path": "x.B"}},
        ),
        ("a: 1e-4", "b: 1E5", {"a": 1e-4, "b": 1e5}),
    ],
)
def test_configuration_is_merged_into_base(tmp_path, base, over, expected):
    assert merged(tmp_path, base, over) == expected


def test_merged_keys_keep_order_of_base(tmp_path):
    values = merged(tmp_path, "b: 1\na: 2", "c: 3\nb: 4")
    assert list(values) == ["b", "a", "c"]


def test_origin_is_traced_through_chain_of_bases(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "team" / "base.yaml", "base: gpt/124m\ntrainer: {max_steps: 7}\n")
    config = resolve_config(write(tmp_path / "mine.yaml", "base: team/base.yaml\nsample: null\n"))
    assert [path.name for path, _ in config.layers] == [
        "mine.yaml",
        "base.yaml",
        "124m.yaml",
        "gpt2-common.yaml",
        "common.yaml",
        "common.yaml",
    ]
    expected = {
        ("sample",): str(tmp_path / "mine.yaml"),
        ("trainer", "max_steps"): str(tmp_path / "team" / "base.yaml"),
        ("seed_everything",): "common",
        ("model", "init_args", "config", "hidden_size"): "gpt/124m",
        ("trainer", "callbacks", 0, "init_args", "monitor"): "common",
        ("sample", "prompt"): None,
    }
    assert {path: config.origin(path) for path in expected} == expected


def test_base_is_resolved_relative_to_file(tmp_path, monkeypatch):
    write(tmp_path / "configs" / "gpt" / "nano", "a: 1")
    file = write(tmp_path / "configs" / "mine.yaml", "base: gpt/nano")
    monkeypatch.chdir("/")
    assert resolve_config(file).values == {"a": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "base: gpt/124n",
            "mine.yaml: base: gpt/124n is neither a file nor a recipe; did you mean 'gpt/124m'?",
        ),
        ("base: [gpt/124m]", "must be the name of one recipe or file"),
        (
            "base: mine.yaml",
            "mine.yaml leads back to a file that is being read: .*mine.yaml -> .*mine.yaml",
        ),
        (
            "base: other.yaml",
            "other.yaml: base: mine.yaml leads back .*mine.yaml -> .*other.yaml -> .*mine.yaml. "
            "Remove one base",
        ),
        ("- 1", "mine.yaml has a list, but a configuration is a mapping"),
        ("a: [", "mine.yaml: is not YAML: while parsing"),
    ],
)
def test_invalid_configuration_is_refused(tmp_path, text, words):
    write(tmp_path / "other.yaml", "base: mine.yaml")
    with pytest.raises(UserError, match=words):
        resolve_config(write(tmp_path / "mine.yaml", text))


def test_file_without_base_is_passed_as_path(tmp_path):
    file = write(tmp_path / "mine.yaml", "sample: null")
    assert resolve_configs(["--config", str(file), "--sample", "null"]) == [
        f"--config={file}",
        "--sample",
        "null",
    ]


def test_options_override_configurations_that_follow(ptdp, tmp_path):
    first, second = (
        write(tmp_path / f"{number}.yaml", f"trainer: {{max_steps: {number}}}") for number in (1, 2)
    )
    words = ["--trainer.max_steps", "3", "--config", str(first), "-c", str(second)]
    assert resolve_configs(words) == [
        f"--config={first}",
        f"--config={second}",
        "--trainer.max_steps",
        "3",
    ]
    code, text, _ = ptdp("fit", *words[:2], "--config", "gpt/nano", *words[2:], "--print_config")
    assert code == 0 and "\n  max_steps: 3\n" in text


def test_print_config_shows_merged_configuration(ptdp, tmp_path):
    text = (
        "base: gpt/124m\nmodel: {init_args: {optimizer: {learning_rate: 1e-3}}}\ntrainer: "
        "{logger: {class_path: CSVLogger}}\n"
    )
    mine = write(tmp_path / "mine.yaml", text)
    code, out, err = ptdp(
        "fit", "--config", str(mine), "--trainer.max_steps", "9", "--print_config"
    )
    assert code == 0, err
    values = yaml.safe_load(out)
    assert "base" not in values
    assert (
        values["model"]["init_args"]["config"]["num_layers"],
        values["trainer"]["max_steps"],
    ) == (12, 9)
    assert values["model"]["init_args"]["optimizer"]["learning_rate"] == 1e-3
    assert "experiment_name" not in values["trainer"]["logger"]["init_args"]


def test_run_saves_merged_configuration(ptdp, config, tmp_path):
    child = write(
        tmp_path / "child.yaml",
        f"base: {os.path.basename(config)}\ntrainer: {{max_steps: 1}}\nsample: null\n",
    )
    code, _, err = ptdp("fit", "--config", str(child))
    assert code == 0, err
    (saved,) = (tmp_path / "runs" / "tiny").glob("*/config.yaml")
    values = yaml.safe_load(saved.read_text())
    assert "base" not in values
    assert (
        values["trainer"]["max_steps"],
        values["model"]["init_args"]["config"]["hidden_size"],
    ) == (1, 32)


def origins_of(shown):
    """Return the last comment of each line, keyed by its text without indentation."""
    lines = [line.rpartition("  # ") for line in shown.splitlines() if "  # " in line]
    return {text.strip().removeprefix("- "): origin for text, _, origin in lines}


def test_show_resolved_names_origin_of_every_value(ptdp, tmp_path):
    mine = write(
        tmp_path / "mine.yaml", "base: gpt/124m\ntrainer: {max_steps: 33, callbacks: []}\n"
    )
    overrides = [
        "--model.config.dropout=0.5",
        "--trainer.strategy.recompute",
        "full",
        "--trainer.logger=CSVLogger",
        "--sample.top_k=7",
    ]
    code, out, err = ptdp("recipes", "show", str(mine), "--resolved", *overrides)
    assert code == 0, err
    origins = origins_of(out)
    expected = {
        "max_steps: 33": str(mine),
        "callbacks: []": str(mine),
        "num_layers: 12": "gpt/124m",
        "vocabulary_size: 50257": "gpt/gpt2-common",
        "betas: [0.9, 0.95]": "gpt/common",
        "accelerator: gpu": "common",
        "seed_everything: 1234": "common",
        "dropout: 0.5": "command line",
        "recompute: full": "command line",
        "class_path: lightning.pytorch.loggers.CSVLogger": "command line",
        "name: lightning_logs": "default of CSVLogger",
        "save_dir: runs": "common",  # CSVLogger accepts it too
        "top_k: 7": "command line",
        "temperature: 0.8": "gpt/common",
        "norm_eps: 1.0e-05": "default of GPTConfig",
        "bucket_mb: null": "default of PTDPStrategy",
        "benchmark: null": "default of Trainer",
        "window: 20": "default of Throughput",
        "text_field: text": "default of TextDataModule",
        "ckpt_path: null": "default of ptdp fit",
    }
    assert {key: origins.get(key) for key in expected} == expected
    assert len(origins_of(out)) > 90
    printed = ptdp("fit", "--config", str(mine), *overrides, "--print_config")[1]
    assert yaml.safe_load(out) == yaml.safe_load(printed)


def test_origin_of_repeated_class_and_added_callback(ptdp):
    overrides = ["--data=TextDataModule", "--trainer.callbacks+=RichProgressBar"]
    code, out, err = ptdp("recipes", "show", "gpt/nano", "--resolved", *overrides)
    assert code == 0, err
    origins = origins_of(out)
    assert origins["class_path: lightning_ptdp.data.TextDataModule"] == "command line"
    assert origins["data_dir: ptdp-data/python-8k"] == "gpt/nano"
    assert origins["class_path: lightning.pytorch.callbacks.RichProgressBar"] == "command line"
    assert origins["class_path: lightning.pytorch.callbacks.ModelCheckpoint"] == "common"


def test_show_accepts_fit_options_only_with_resolved(ptdp):
    code, _, err = ptdp("recipes", "show", "gpt/nano", "--trainer.max_steps=3")
    assert code == 2
    assert "--trainer.max_steps=3: options of ptdp fit need --resolved" in err
    code, _, err = ptdp("recipes", "show", "gpt/nano", "--resolved", "--trainer.max_stepz=3")
    assert code == 2
    assert "max_stepz" in err
    code, _, err = ptdp("recipes", "show", "gpt/nano", "--resolved", "-c", "gpt/124m")
    assert code == 2
    assert "takes one configuration. Give a file with base: gpt/nano" in err


def test_recipe_list_shows_size_and_layout(ptdp):
    code, out, _ = ptdp("recipes", "list")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert (
        "gpt/124m 124 M 8 t1 p1 v1 d8 GPT-2 small, 300 B tokens in batches of 0.5 M on 8 GPUs"
        in lines
    )
    assert not any("common" in line.partition(" ")[0] for line in lines)
    names = [line.partition(" ")[0] for line in lines]
    assert (
        names.index("gpt/ptdp-1.7b")
        < names.index("gpt/ptdp-18.4b")
        < names.index("gpt/ptdp-310.1b")
        < names.index("gpt/ptdp-1t")
    )
