"""Recipes without their machines: parsed, built on the meta device, split, scheduled and compared
with their papers."""

import functools
import importlib
import re
from decimal import Decimal
from itertools import pairwise

import pytest
import torch
import yaml

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.cli.config_files import (
    BASE_KEY,
    find_config,
    recipe_folder,
    recipe_names,
    resolve_config,
    resolve_configs,
)
from lightning_ptdp.cli.lightning_cli import parsed_values
from lightning_ptdp.pipeline.containers import layer_ranges
from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.strategy.checks.data import check_data
from lightning_ptdp.strategy.checks.model import check_model
from tests.recipes.published import PUBLISHED

pytestmark = pytest.mark.thorough

RECIPES = recipe_names()
SIZED = [name for name in RECIPES if not name.startswith("hf/")]  # recipes with model sizes
UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@functools.cache
def parsed(name):
    return parsed_values(resolve_configs(["--config", name]))


def built(node):
    module, _, name = node["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**node["init_args"])


def strategy_of(name):
    node = parsed(name)["trainer"]["strategy"]
    assert node["class_path"] == "lightning_ptdp.PTDPStrategy"
    return PTDPStrategy(**node["init_args"])


def devices_of(name):
    trainer = parsed(name)["trainer"]
    return int(trainer["devices"]) * int(trainer["num_nodes"])


def is_rounded(number, printed):
    """Return True if ``number``, rounded to its digits, is ``printed`` ("1.7 B", "34e1 M")."""
    digits, unit = printed.split()
    printed_value, last = (
        Decimal(digits) * UNITS[unit],
        Decimal(1).scaleb(Decimal(digits).as_tuple().exponent) * UNITS[unit],
    )
    return abs(Decimal(number) - printed_value) <= last / 2


def test_rounding_to_printed_digits():
    assert is_rounded(1_652_000_000, "1.7 B")
    assert not is_rounded(1_649_000_000, "1.7 B")
    assert is_rounded(335_500_000, "34e1 M")
    assert not is_rounded(334_000_000, "34e1 M")


def test_every_published_model_has_a_recipe():
    assert set(SIZED) - set(PUBLISHED) == {
        "bert/nano",
        "gpt/llama-nano",
        "gpt/moe-nano",
        "gpt/nano",
        "gpt/nano-muon",
    }
    assert set(PUBLISHED) <= set(RECIPES)


@pytest.mark.parametrize("name", SIZED)
def test_layout_stages_and_schedule_are_valid(name):
    strategy = strategy_of(name)
    config, layout = strategy.config, strategy.config.layout(devices_of(name))
    module = built(parsed(name)["model"])
    with torch.device("meta"):
        module.configure_model()
    known = check_model(module, config, layout)
    layers = parsed(name)["model"]["init_args"]["config"]["num_layers"]
    parts = find_parts(module, module.configure_parallel()) if known is None else known.parts
    ranges = layer_ranges(module, parts=parts, layout=layout, partition=config.partition)
    assert (ranges[0][0], ranges[-1][1], len(ranges)) == (0, layers, layout.num_stages)
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    if name.startswith("gpt/ptdp-"):  # as their comments state
        assert {stop - start for start, stop in ranges} == {layers // layout.num_stages}
    assert config.num_microbatches % layout.pipeline_parallel_size == 0
    # build_schedule verifies the schedule. Two rounds through the pipeline contain every phase of a
    # step; more rounds repeat the middle phase.
    schedule = config.build_schedule(
        min(config.num_microbatches, 2 * layout.pipeline_parallel_size)
    )
    assert schedule.num_stages == layout.num_stages

    count = sum(parameter.numel() for parameter in module.parameters())
    assert count == module.num_parameters
    first = find_config(name).read_text().partition("\n")[0]
    said = re.fullmatch(r"# ([\d.]+ [KMBT]) parameters: .+", first)
    assert said is not None, first
    assert is_rounded(count, said[1])
    if name in PUBLISHED:
        assert is_rounded(count, PUBLISHED[name].parameters), f"{count:,}"


@pytest.mark.parametrize("name", SIZED)
def test_data_and_batches_match_model_and_paper(name):
    values, strategy = parsed(name), strategy_of(name)
    data, sizes = values["data"]["init_args"], values["model"]["init_args"]["config"]
    assert data["vocabulary_size"] == sizes["vocabulary_size"]
    assert data["sequence_length"] == sizes["sequence_length"]
    assert data["num_microbatches"] == strategy.config.num_microbatches
    datamodule, layout = built(values["data"]), strategy.config.layout(devices_of(name))
    check_data(datamodule, strategy.config, layout)
    optimizer = values["model"]["init_args"]["optimizer"]
    assert (
        0
        < optimizer["warmup_steps"]
        < (optimizer["decay_steps"] or values["trainer"]["max_steps"])
        <= values["trainer"]["max_steps"]
    )
    if name not in PUBLISHED:
        return
    wanted = PUBLISHED[name]
    assert [
        plan.global_batch for plan in datamodule.batch_plans(num_replicas=layout.data_parallel_size)
    ] == [wanted.batch]
    assert wanted.tensor in (None, layout.tensor_parallel_size)
    assert wanted.pipeline in (None, layout.pipeline_parallel_size)
    assert wanted.devices in (None, layout.world_size)


@pytest.mark.parametrize("name", recipe_names(shared=True))
def test_recipe_has_description_and_base(name):
    text = (recipe_folder() / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert all(len(line) <= 140 for line in text.splitlines())
    assert (BASE_KEY in yaml.safe_load(text)) == (name != "common")
    assert resolve_config(find_config(name)).values


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_has_its_own_experiment_name(name):
    assert parsed(name)["trainer"]["logger"]["init_args"]["experiment_name"] == name.replace(
        "/", "-"
    )


@pytest.mark.parametrize("name", RECIPES)
def test_gpu_recipes_use_bf16_with_master_weights(name):
    trainer = parsed(name)["trainer"]
    assert trainer["precision"] == ("bf16-true" if trainer["accelerator"] == "gpu" else "32-true")
    assert PTDPStrategy(**trainer["strategy"]["init_args"]).config.master_weights


def test_single_device_options_are_valid():
    """Check the options for one GPU and for a CPU that ``recipes/common.yaml`` documents."""
    one = [
        "--trainer.devices",
        "1",
        "--trainer.strategy.num_microbatches",
        "32",
        "--data.num_microbatches",
        "32",
    ]
    values = parsed_values(resolve_configs(["--config", "gpt/124m", *one]))
    data = values["data"]["init_args"]
    assert (
        PTDPStrategy(**values["trainer"]["strategy"]["init_args"]).config.layout(1).world_size == 1
    )
    assert data["micro_batch_size"] * data["num_microbatches"] == PUBLISHED["gpt/124m"].batch

    sizes = [
        "tensor_parallel_size=1",
        "pipeline_parallel_size=1",
        "virtual_pipeline_size=1",
        "sequence_parallel=false",
    ]
    nodes = [
        "--trainer.num_nodes",
        "1",
        "--trainer.accelerator",
        "cpu",
        "--trainer.precision",
        "32-true",
    ]
    values = parsed_values(
        resolve_configs(
            [
                "--config",
                "gpt/ptdp-145.6b",
                *one,
                *nodes,
                *(f"--trainer.strategy.{size}" for size in sizes),
            ]
        )
    )
    assert (
        PTDPStrategy(**values["trainer"]["strategy"]["init_args"]).config.layout(1).world_size == 1
    )
    assert values["trainer"]["accelerator"] == "cpu"
