"""The recipes that train a model of Hugging Face, without their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.cli.inheritance import resolve_configs
from lightning_ptdp.cli.lightning_cli import parsed_values
from lightning_ptdp.cli.recipe_files import recipe_names
from lightning_ptdp.models import LitCausalLM
from lightning_ptdp.strategy.checks import check_model

pytest.importorskip("transformers")

RECIPES = [name for name in recipe_names() if name.startswith("hf/")]


@pytest.mark.parametrize("name", RECIPES)
def test_the_layout_fits_the_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = parsed_values(resolve_configs(["--config", name]))
    trainer = values["trainer"]
    config = PTDPStrategy(**trainer["strategy"]["init_args"]).config
    layout = config.layout(trainer["devices"] * trainer["num_nodes"])
    check_model(LitCausalLM(**values["model"]["init_args"]), config, layout)
    assert values["data"]["init_args"]["num_microbatches"] == config.num_microbatches
