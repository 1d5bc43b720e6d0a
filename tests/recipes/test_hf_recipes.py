"""The recipes that train a model of Hugging Face, without their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.cli.inheritance import resolve_configs
from lightning_ptdp.cli.lightning_cli import parsed_values
from lightning_ptdp.cli.recipe_files import find_config, recipe_names
from lightning_ptdp.models import LitCausalLM
from lightning_ptdp.strategy.checks import check_model

pytest.importorskip("transformers")

RECIPES = [name for name in recipe_names() if name.startswith("hf/")]


# Sizes and parameters as published: arXiv 2407.21783, table 3; arXiv 2505.09388, table 1 and the models' cards.
_LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
_QWEN = {
    "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
}  # fmt: skip


def sizes(known: dict[str, Any], layers: int, hidden: int, ffn: int, heads: int) -> dict[str, Any]:
    more = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads}
    return {**known, **more, "tie_word_embeddings": False}


PUBLISHED = {
    "hf/llama-3-8b": (sizes(_LLAMA, 32, 4096, 14336, 32), "8.03 B"),
    "hf/llama-3-70b": (sizes(_LLAMA, 80, 8192, 28672, 64), "70.6 B"),
    "hf/qwen3-8b": (sizes(_QWEN, 36, 4096, 12288, 32), "8.19 B"),
    "hf/qwen3-32b": (sizes(_QWEN, 64, 5120, 25600, 64), "32.8 B"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_layout_fits_the_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = parsed_values(resolve_configs(["--config", name]))
    trainer, arguments = values["trainer"], values["model"]["init_args"]
    published = PUBLISHED.get(name)
    if published is not None:  # its weights are on the hub
        (tmp_path / "config.json").write_text(json.dumps(published[0]))
        arguments["path"] = str(tmp_path)
    strategy = PTDPStrategy(**trainer["strategy"]["init_args"])
    layout = strategy.config.layout(trainer["devices"] * trainer["num_nodes"])
    module = LitCausalLM(**arguments)
    with torch.device("meta"):
        module.configure_model()
    check_model(module, strategy.config, layout)
    data = values["data"]["init_args"]
    assert data["num_microbatches"] == strategy.config.num_microbatches
    assert data["sequence_length"] <= module.model.config.max_position_embeddings
    assert strategy.config.num_microbatches % layout.pipeline_parallel_size == 0
    if published is not None:
        count, said = sum(parameter.numel() for parameter in module.parameters()), published[1]
        assert f"{count / 1e9:.3g} B" == said
        first = find_config(name).read_text().partition("\n")[0]
        assert first.startswith(f"# {said} parameters: ")
        assert f"{data['num_microbatches'] * layout.data_parallel_size * data['sequence_length'] / 1e6:.1f} M tokens" in first
