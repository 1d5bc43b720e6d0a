"""Encoder-decoders, with one pipeline over both stacks, match a single process."""

import math

import pytest

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.strategy.checks.model import check_model
from tests.errors import raises_with
from tests.huggingface.runs import LAYOUTS, LitHuggingFace, Run

pytestmark = pytest.mark.thorough

pytest.importorskip("transformers")


@pytest.mark.parametrize("layout", ["p2", "p2v2", "p4", "t2", "t2p2", "t4"])
@pytest.mark.parametrize("model", ["t5", "bart"])
def test_encoder_decoder_matches_single_process(model, layout, parity):
    parity.check(Run(model=model), LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["p2v2", "p4", "t2p2"])
def test_torch_transformer_matches_single_process(layout, parity):
    parity.check(Run(model="transformer"), LAYOUTS[layout])


@pytest.mark.parametrize(
    ("run", "layout"),
    [
        (
            Run(
                model="t5",
                eager=True,
                whole_output=True,
                options=(("feed_forward_proj", "gated-gelu"),),
            ),
            "p4",
        ),
        (
            Run(
                model="bart",
                whole_output=True,
                options=(("scale_embedding", True), ("attn_implementation", "eager")),
            ),
            "p2",
        ),
        (Run(model="t5", options=(("tie_word_embeddings", False), ("use_cache", False))), "full"),
        (Run(model="bart", options=(("use_cache", False),)), "full"),
        (Run(model="t5"), "named"),
    ],
)
def test_model_options_recomputation_and_named_partition(run, layout, parity):
    parity.check(run, LAYOUTS[layout])


@pytest.mark.parametrize(
    ("options", "degrees", "words"),
    [
        (
            (("encoder_layerdrop", 0.1),),
            {"pipeline_parallel_size": 2},
            ["'model.model.encoder'", "layerdrop=0.1", "pipeline_parallel_size=1"],
        ),
        (
            (),
            {"tensor_parallel_size": 2, "sequence_parallel": True},
            ["sequence_parallel=True", "Use sequence_parallel=False"],
        ),
        ((), {"context_parallel_size": 2}, ["context_parallel_size=2"]),
        ((), {"pipeline_parallel_size": 8}, ["num_layers=5", "pipeline_parallel_size=5"]),
    ],
)
def test_unsupported_encoder_decoder_is_refused_before_launch(options, degrees, words):
    config = PTDPConfig(num_microbatches=8, **degrees)
    world_size = math.prod(value for key, value in degrees.items() if key.endswith("_size"))
    module = LitHuggingFace(Run(model="bart", options=options, eager=True))
    with raises_with(words):
        check_model(module, config, config.layout(world_size))


def test_layers_skipped_at_random_need_all_shards_gathered_before():
    module = LitHuggingFace(Run(model="bart", options=(("encoder_layerdrop", 0.1),), eager=True))
    config = PTDPConfig(shard="parameters")
    with raises_with(["layerdrop=0.1", "replicas must gather the same", "reshard_after='step'"]):
        check_model(module, config, config.layout(2))
    for config in (PTDPConfig(shard="parameters", reshard_after="step"), PTDPConfig()):
        check_model(module, config, config.layout(2))
