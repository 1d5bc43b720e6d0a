"""Models that use a parameter without calling its module (DeBERTa's positions) or compute one
(wav2vec2's convolution)."""

import pytest

from tests.huggingface.runs import VOCABULARY, LitHuggingFace, Run
from tests.letters import M, P, V

pytestmark = pytest.mark.thorough

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Deberta(LitHuggingFace):
    def configure_model(self):
        if self.model is None:
            config = transformers.DebertaV2Config(
                **SMALL,
                **NO_DROPOUT,
                relative_attention=True,
                position_biased_input=False,
                pos_att_type=["p2c", "c2p"],
                max_position_embeddings=32,
            )
            self.model = transformers.DebertaV2ForMaskedLM(config)


class Wav2Vec2(LitHuggingFace):
    """Built in ``__init__``, because its own initializer does not set the weight-norm parts of its
    convolution."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        if self.model is None:
            dropouts = ("hidden", "attention", "activation", "feat_proj", "final")
            config = transformers.Wav2Vec2Config(
                **SMALL,
                **{f"{where}_dropout": 0.0 for where in dropouts},
                layerdrop=0.0,
                mask_time_prob=0.0,
                conv_dim=(16, 16),
                conv_stride=(5, 2),
                conv_kernel=(10, 3),
                num_feat_extract_layers=2,
                num_conv_pos_embeddings=16,
                num_conv_pos_embedding_groups=4,
                ctc_loss_reduction="mean",
            )
            self.model = transformers.Wav2Vec2ForCTC(config)

    def loss(self, batch):
        waves = (batch["input_ids"] / VOCABULARY).repeat_interleave(20, 1)
        return self.model(waves, labels=batch["labels"][:, :5]).loss

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)


@pytest.mark.parametrize("layout", [{P: 2}, {P: 2, V: 2}])
@pytest.mark.parametrize("module", [Deberta, Wav2Vec2])
def test_model_trains_like_single_process(module, layout, parity):
    run = Run(model="", module=module, layout={M: 2})
    parity.check(run, (2, layout))
