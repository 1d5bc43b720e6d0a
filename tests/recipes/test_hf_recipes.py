"""Recipes for Hugging Face models, checked without weights."""

import json
from decimal import Decimal
from pkgutil import resolve_name

import pytest
import torch

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.cli.config_files import find_config, recipe_names, resolve_configs
from lightning_ptdp.cli.lightning_cli import parsed_values
from lightning_ptdp.pipeline.containers import layer_ranges
from lightning_ptdp.strategy.checks.model import check_model
from lightning_ptdp.world.axes import stages_of_rank

pytestmark = pytest.mark.thorough

pytest.importorskip("transformers")

RECIPES = [name for name in recipe_names() if name.startswith("hf/")]


# Sizes and parameters as published: arXiv 2407.21783, table 3; arXiv 2505.09388, table 1 and the
# models' cards.
_LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
_QWEN = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}


def sizes(known, layers, hidden, ffn, heads):
    more = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
    }
    return {**known, **more, "tie_word_embeddings": False}


PUBLISHED = {
    "hf/llama-3-8b": (sizes(_LLAMA, 32, 4096, 14336, 32), "8.03 B"),
    "hf/llama-3-70b": (sizes(_LLAMA, 80, 8192, 28672, 64), "70.6 B"),
    "hf/qwen3-8b": (sizes(_QWEN, 36, 4096, 12288, 32), "8.19 B"),
    "hf/qwen3-32b": (sizes(_QWEN, 64, 5120, 25600, 64), "32.8 B"),
}
# Recipes that contain the sizes: all parameters, active parameters per token, and sequences per
# batch if published. Sources: arXiv 2401.04088, section 1, and the announcement of Mixtral; the
# model card of Qwen3; arXiv 2412.19437, sections 4.2 and 2.1, for DeepSeek-V3 (without its layer
# for multi-token prediction). All three count the embedding and the head; the last two truncate
# digits instead of rounding.
MIXTURES = {
    "hf/mixtral-8x7b": ("46.7 B", "12.9 B", None),
    "hf/qwen3-30b-a3b": ("30.5 B", "3.3 B", None),
    "hf/deepseek-v3": ("671 B", "37 B", 15360),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_layout_fits_model(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = parsed_values(resolve_configs(["--config", name]))
    trainer, arguments = values["trainer"], values["model"]["init_args"]
    published = PUBLISHED.get(name)
    if published is not None:  # its weights are on the hub
        (tmp_path / "config.json").write_text(json.dumps(published[0]))
        arguments["path"] = str(tmp_path)
    strategy = PTDPStrategy(**trainer["strategy"]["init_args"])
    layout = strategy.config.layout(trainer["devices"] * trainer["num_nodes"])
    module = resolve_name(values["model"]["class_path"])(**arguments)
    with torch.device("meta"):
        module.configure_model()
    known = check_model(module, strategy.config, layout)
    data = values["data"]["init_args"]
    assert data["num_microbatches"] == strategy.config.num_microbatches
    sizes = module.model.config.get_text_config()
    assert data["sequence_length"] <= sizes.max_position_embeddings
    schedule = strategy.config.build_schedule(
        min(strategy.config.num_microbatches, 2 * layout.pipeline_parallel_size)
    )
    assert schedule.num_stages == layout.num_stages
    assert (
        strategy.config.num_microbatches % layout.pipeline_parallel_size == 0
        or strategy.config.schedule == "dualpipe_v"
    )
    said = (
        published[1] if published is not None else MIXTURES[name][0] if name in MIXTURES else None
    )
    if said is not None:
        count = sum(parameter.numel() for parameter in module.parameters())
        assert f"{count / 1e9:.3g} B" == said
        first = find_config(name).read_text().partition("\n")[0]
        assert first.startswith(f"# {said} parameters: ")
        assert (
            f"{data['num_microbatches'] * layout.data_parallel_size * data['sequence_length'] / 1e6:.1f} M tokens"
            in first
        )
    if name in MIXTURES:
        assert data["vocabulary_size"] == module.model.config.vocab_size
        check_mixture(name, module, strategy, layout, known.parts)


def check_mixture(name, module, strategy, layout, parts):
    """Check the active parameters of a mixture, its batch, and the memory of the fullest rank."""
    _, active, batch = MIXTURES[name]
    experts = [child for child in module.modules() if type(child).__name__.endswith("Experts")]
    config = module.model.config
    assert {child.num_experts for child in experts} == {config.num_local_experts}
    held = sum(parameter.numel() for child in experts for parameter in child.parameters())
    count = sum(parameter.numel() for parameter in module.parameters())
    met = count - held + held * config.num_experts_per_tok / config.num_local_experts
    digits, last = (
        Decimal(active.removesuffix(" B")),
        Decimal(1).scaleb(Decimal(active.removesuffix(" B")).as_tuple().exponent),
    )
    assert digits - last / 2 <= Decimal(met) / 10**9 < digits + last
    assert f"{active} active per token" in find_config(name).read_text().partition("\n")[0]
    if batch is not None:
        assert strategy.config.num_microbatches * layout.data_parallel_size == batch

    # docs/layout.md, "Memory of weights and optimizer": with a sharded optimizer 6 bytes per
    # parameter, and 12 bytes per parameter of the rank's optimizer shard.
    e, d, p = layout.expert_parallel_size, layout.data_parallel_size, layout.pipeline_parallel_size
    layers = module.model.model.layers
    ranges = layer_ranges(module, parts=parts, layout=layout)
    ends = [[module.get_submodule(one) for one in names] for names in (parts.before, parts.after)]
    fullest = 0.0
    for rank in range(p):
        stages = stages_of_rank(p, layout.virtual_pipeline_size, rank, layout.placement)
        mine = [layer for stage in stages for layer in layers[slice(*ranges[stage])]]
        mine += ends[0] * (0 in stages) + ends[1] * (layout.num_stages - 1 in stages)
        every = [x for one in mine for x in one.parameters()]
        of_experts = sum(x.numel() for x in every if x.dim() == 3)
        others = sum(x.numel() for x in every) - of_experts
        fullest = max(fullest, of_experts / e * (6 + 12 * e / d) + others * (6 + 12 / d))
    assert fullest < 48e9, "too little memory is left for activations"
