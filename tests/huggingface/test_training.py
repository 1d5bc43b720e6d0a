"""A LightningModule around a Hugging Face model trains unmodified and equally in every layout."""

from dataclasses import replace

import pytest

from tests.huggingface.runs import LAYOUTS, SAMPLES, LitHuggingFace, Run
from tests.parity import assert_near, assert_weights_near

pytestmark = pytest.mark.thorough

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(("llama", name) for name in ("t2", "p2", "t2p2v2", "t2p2v2sp")),
        *((model, name) for model in ("gpt2", "bert") for name in ("t2p2v2", "t2p2v2sp")),
    ],
)
def test_model_matches_single_process(model, layout, parity):
    parity.check(Run(model=model), LAYOUTS[layout])


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_bfloat16_pipeline_matches_single_process(model, eager, parity):
    run = Run(model=model, eager=eager, precision="bf16-true")
    parity.check(run, LAYOUTS["p2"], tolerance=5e-2)


@pytest.mark.parametrize(
    ("model", "options", "layout"),
    [
        ("llama", (), "t4sp"),
        ("llama", (("num_key_value_heads", 1), ("attention_bias", True)), "t2p2"),
        ("llama", (("tie_word_embeddings", True),), "d2t2p2"),
        ("qwen3", (), "t4"),
        ("gemma3", (), "t2p2v2"),
        ("phi3", (), "t2"),
        ("gpt_neox", (), "t2sp"),
        ("opt", (), "p2"),
    ],
)
def test_declared_plan_matches_single_process(model, options, layout, parity):
    parity.check(Run(model=model, options=options), LAYOUTS[layout])


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ((), "t2"),
        ((), "t2p2v2sp"),
        ((("norm_first", True), ("activation", "gelu"), ("batch_first", False)), "t2p2v2"),
    ],
)
def test_torch_transformer_encoder_matches_single_process(options, layout, parity):
    parity.check(Run(model="encoder", options=options), LAYOUTS[layout])


class LitCheckpointing(LitHuggingFace):
    """Turns on the model's own recomputation, with frozen embeddings as in adapter training."""

    def configure_model(self):
        super().configure_model()
        self.model.gradient_checkpointing_enable({"use_reentrant": True})
        self.model.get_input_embeddings().requires_grad_(False)


@pytest.mark.parametrize("layout", ["t2p2v2sp", "d2"])
def test_gradient_checkpointing_of_model_matches_single_process(layout, parity):
    parity.check(Run(model="llama", module=LitCheckpointing), LAYOUTS[layout])


def test_eager_model_with_whole_output_matches_single_process(parity):
    parity.check(Run(model="gpt2", eager=True, whole_output=True), LAYOUTS["t2p2v2"])


def test_checkpoint_of_copied_heads_resumes_in_other_layout(parity, tmp_path):
    # an epoch is one batch: Lightning does not resume within an epoch of a plain loader
    whole = Run(model="llama", global_batch=SAMPLES)
    first = replace(whole, steps=1, save=str(tmp_path / "one epoch"))
    for source, target in (("t4", "t2p2v2"), ("p2", "t4")):
        for run, layout in ((first, source), (replace(whole, resume=first.save), target)):
            found = parity.ranks(run.on(LAYOUTS[layout]))[0]
        expected = parity.result(whole)
        assert_near(found["losses"], expected["losses"][1:], 1e-5, "losses")
        assert_weights_near(found["final"], expected["final"])
