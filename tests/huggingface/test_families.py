"""Models of every family in FAMILIES, three encoder-decoders, and models with parts that sequence
parallelism leaves whole match a single process."""

import pytest

from lightning_ptdp.models.plans import FAMILIES, find_plan
from tests.huggingface.architectures import ARCHITECTURES, build
from tests.huggingface.unseen import Run, check
from tests.letters import SP, M, P, T, V

pytestmark = pytest.mark.thorough

pytest.importorskip("transformers")

ENCODER_DECODERS = ("t5", "bart", "whisper")
WHOLE_PARTS = ("phi3", "olmo2", "nemotron", "mixtral", "qwen2_moe", "deepseek_v3")


def family_of(name):
    """Return the family without its import, which takes seconds for all of them."""
    others = {"deberta": "deberta_v2", "audio spectrogram": "audio_spectrogram_transformer"}
    return others.get(name, name.partition(" ")[0])


def plan_of(name):
    plan = find_plan(build(name))
    assert plan is not None
    return plan


OF_ROWS = [
    name
    for name in ARCHITECTURES
    if not name.endswith("classes") and name != "bert question" and family_of(name) in FAMILIES
]


def test_every_family_is_tested():
    built = {name: type(build(name)).__module__.split(".")[2] for name in OF_ROWS}
    assert built == {name: family_of(name) for name in OF_ROWS}
    assert set(built.values()) == set(FAMILIES)


@pytest.mark.parametrize("name", [*OF_ROWS, *WHOLE_PARTS, *ENCODER_DECODERS])
def test_weights_match_single_process(name, parity):
    why_not = plan_of(name).why_not
    layout = {T: 2, SP: plan_of(name).sequence is not None}
    if "pipeline" not in why_not:
        layout |= {P: 2, M: 2}
    check(Run(architecture=name, steps=2), (4 if P in layout else 2, layout), parity)


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
@pytest.mark.parametrize("name", ["llama", "t5", "mixtral"])
def test_sharded_training_matches_single_process(name, shard, parity):
    layout = {P: 2, M: 2, "shard": shard, "bucket_mb": 1e-2}
    check(Run(architecture=name, steps=2), (4, layout), parity)


def test_projections_fused_by_shards_match_single_process(parity):
    """CodeGen views them in the shape of its input, which must be that of the whole sequence. From
    transformers 5.24 on it declares a plan."""
    if find_plan(build("codegen")) is None:
        pytest.skip("this release of transformers declares no plan of CodeGen")
    check(Run(architecture="codegen", steps=2), (2, {T: 2, SP: True}), parity)


@pytest.mark.parametrize("name", ["falcon", "gpt_neo"])
def test_hidden_states_collected_by_model_loop(name, parity):
    run = Run(architecture=name, options={"output_hidden_states": True}, hidden=True)
    check(run, (2, {P: 2, V: 2, M: 2}), parity)


@pytest.mark.parametrize(("name", "options"), [("mpnet", {}), ("t5", {"num_heads": 16})])
def test_attention_biases_are_sent_whole_between_stages(name, options, parity):
    """Tensor-parallel ranks share the sending of replicated tensors, but each rank has the bias, or
    its gradient, of its own heads."""
    run = Run(architecture=name, options=options, steps=2)
    check(run, (4, {T: 2, P: 2, M: 2}), parity)
