"""Modules with several models: CLIP, LED, Informer, a student and its teacher."""

import pytest
import torch

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.strategy.checks.model import check_model
from tests.huggingface.runs import VOCABULARY, LitHuggingFace, Run, make_model
from tests.letters import C, M, P, T, V, Z

pytestmark = pytest.mark.thorough

transformers = pytest.importorskip("transformers")

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
STACKS = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}


class LitTowers(LitHuggingFace):
    def loss(self, batch):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)


class Clip(LitTowers):
    """The text tower is registered first and called last."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        text = {
            **TOWER,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "eos_token_id": VOCABULARY - 1,
        }
        vision = {**TOWER, "image_size": 8, "patch_size": 4}
        self.model = transformers.CLIPModel(
            transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
        )

    def loss(self, batch):
        tokens = batch["input_ids"]
        images = (tokens / VOCABULARY).repeat(1, 16).view(len(tokens), 3, 8, 8)
        return self.model(input_ids=tokens, pixel_values=images, return_loss=True).loss


class Led(LitTowers):
    """Looks up positions by the shape of the ids."""

    def configure_model(self):
        if self.model is None:
            sizes = {
                "vocab_size": VOCABULARY,
                "max_encoder_position_embeddings": 32,
                "max_decoder_position_embeddings": 32,
            }
            config = transformers.LEDConfig(**STACKS, **sizes, attention_window=[4, 4, 4])
            self.model = transformers.LEDForConditionalGeneration(config)

    def loss(self, batch):
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


class Informer(LitTowers):
    distil = False

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        series = {
            "prediction_length": 4,
            "context_length": 6,
            "num_time_features": 1,
            "lags_sequence": [1, 2],
        }
        drops = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "attention_type": "full"}
        config = transformers.InformerConfig(
            **STACKS, **series, **drops, scaling="mean", distil=self.distil
        )
        self.model = transformers.InformerForPrediction(config)

    def loss(self, batch):
        values = batch["input_ids"] / VOCABULARY
        past, future = values[:, :8], values[:, 8:]
        times = torch.linspace(0, 1, 12, device=values.device).expand_as(values)[..., None]
        return self.model(
            past_values=past,
            past_time_features=times[:, :8],
            past_observed_mask=torch.ones_like(past),
            future_values=future,
            future_time_features=times[:, 8:],
            future_observed_mask=torch.ones_like(future),
        ).loss


class Student(LitTowers):
    """Learns from a teacher of another family, which runs without gradients."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = make_model("llama")
        self.teacher = make_model("gpt2").requires_grad_(False).eval()

    def loss(self, batch):
        tokens = batch["input_ids"]
        with torch.no_grad():
            wanted = self.teacher(input_ids=tokens).logits.softmax(-1)
        learned = self.model(input_ids=tokens).logits
        return -(wanted * learned.log_softmax(-1)).sum(-1).mean()


class Distilling(Informer):
    distil = True


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        (Clip, {P: 2}),
        (Led, {P: 2}),
        (Led, {T: 2}),
        (Informer, {P: 2}),
        (Informer, {P: 2, V: 2}),
        (Student, {T: 2}),
        (Student, {C: 2}),
        (Student, {Z: "parameters"}),
    ],
)
def test_model_trains_like_single_process(module, layout, parity):
    run = Run(model="", module=module, layout={M: 2})
    # CLIP's negatives are those of a microbatch, but a single process evaluates whole batches.
    parity.check(run, (2, layout), but=["val_loss"] if module is Clip else [])


def test_stage_that_begins_in_second_tower_is_refused():
    """A stage that begins inside the second tower lacks the output of the first one."""
    config = PTDPConfig(num_microbatches=2, pipeline_parallel_size=2, virtual_pipeline_size=2)
    with pytest.raises(
        ValueError,
        match=r"cannot cut Clip: .*between or after the repeated blocks.*use pipeline_parallel_size=1",
    ):
        check_model(Clip(Run(model="")), config, config.layout(2))


def test_convolutions_between_blocks_are_refused_before_launch():
    config = PTDPConfig(num_microbatches=2, pipeline_parallel_size=2)
    module = Distilling(Run(model=""))
    with pytest.raises(
        ValueError,
        match=r"'encoder.conv_layers'.*build it with distil=False.*pipeline_parallel_size=1",
    ):
        check_model(module, config, config.layout(2))
