"""LitGPT in a single-process Trainer: loss, logged values, checkpoints and command line."""

import math

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from lightning_ptdp import Sampling, generate
from lightning_ptdp.models import AdamWConfig, GPTConfig, LitGPT, flops_per_sample, num_parameters
from tests.models.configs import GPT2, LLAMA
from tests.models.fits import quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are trying to `self.log"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter"),
]

TOY = GPTConfig.llama(
    vocabulary_size=16,
    sequence_length=12,
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
)
PATTERN = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9])


def built(config=GPT2, **kwargs):
    torch.manual_seed(0)
    lit = LitGPT(config, **kwargs)
    lit.configure_model()
    return lit


def batch_of(vocabulary_size, *, ignored=None):
    ids = torch.randint(vocabulary_size, (3, 9), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    if ignored is not None:
        labels[ignored] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


def pattern_loader(*, rows=4):
    sample = {"input_ids": PATTERN[:-1], "labels": PATTERN[1:]}
    return DataLoader([sample] * rows, batch_size=2)


@pytest.mark.parametrize("strategy", ["auto", "ptdp"])
def test_gradient_clipping_is_allowed_with_mixed_precision(strategy, tmp_path):
    """Lightning refuses it for a fused optimizer step that unscales gradients itself."""
    lit = built()
    before = lit.model.wte.weight.clone()
    options = {
        "strategy": strategy,
        "devices": 1,
        "precision": "bf16-mixed",
        "gradient_clip_val": 0.5,
        "max_steps": 1,
    }
    quiet_trainer(tmp_path, **options).fit(lit, DataLoader([batch_of(61)], batch_size=None))
    assert not torch.equal(lit.model.wte.weight, before)


def test_loss_is_mean_over_counted_tokens():
    lit, ignored = built(), torch.zeros(3, 8, dtype=torch.bool)
    ignored[0, 2:] = ignored[1, 5] = True
    batch = batch_of(61, ignored=ignored)
    output = lit.training_step(batch, 0)
    expected = F.cross_entropy(
        lit(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100
    )
    torch.testing.assert_close(output["loss"], expected)
    assert output["num_tokens"].item() == 24 - 7


def test_loss_of_weighted_microbatches_equals_full_batch():
    lit, ignored = built(LLAMA), torch.zeros(3, 8, dtype=torch.bool)
    ignored[0] = ignored[1, 3:] = True
    batch = batch_of(61, ignored=ignored)
    whole = lit.training_step(batch, 0)
    parts = [
        lit.training_step({key: value[i : i + 1] for key, value in batch.items()}, 0)
        for i in range(3)
    ]
    weighted = sum(part["loss"] * part["num_tokens"] for part in parts) / whole["num_tokens"]
    torch.testing.assert_close(weighted, whole["loss"])


def test_batch_without_counted_tokens_has_zero_loss_and_gradients():
    lit = built()
    output = lit.training_step(batch_of(61, ignored=torch.ones(3, 8, dtype=torch.bool)), 0)
    assert (output["loss"].item(), output["num_tokens"].item()) == (0.0, 0)
    output["loss"].backward()
    assert all(p.grad is not None and not p.grad.any() for p in lit.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_of_half_precision_model_is_float32_mean(dtype):
    lit = built(
        GPTConfig.gpt2(
            vocabulary_size=8, sequence_length=512, num_layers=1, hidden_size=8, num_heads=1
        )
    ).to(dtype)
    # the sum of 40960 losses of about 2 overflows float16
    ids = torch.zeros(80, 512, dtype=torch.int64)
    loss = lit.training_step({"input_ids": ids, "labels": ids}, 0)["loss"]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(8), rel=0.05)


def test_token_loss_of_half_precision_model_is_not_rounded():
    lit, batch = built(LLAMA).to(torch.bfloat16), batch_of(61)
    expected = F.cross_entropy(
        lit(batch["input_ids"]).float().flatten(0, 1), batch["labels"].flatten(), reduction="none"
    )
    losses = lit.predict_step(batch, 0)["token_nll"]
    torch.testing.assert_close(losses.flatten(), expected, rtol=1e-6, atol=1e-6)


def test_predict_scores_each_sample():
    lit, ignored = built(LLAMA).eval(), torch.zeros(3, 8, dtype=torch.bool)
    ignored[1, 3:] = True
    batch = batch_of(61, ignored=ignored)
    scores = lit.summarize_predictions(lit.predict_step(batch, 0))
    assert scores["token_count"].tolist() == [8, 3, 8]
    losses = (
        -lit(batch["input_ids"])
        .log_softmax(-1)
        .gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    )
    torch.testing.assert_close(scores["nll"], losses.masked_fill(ignored, 0.0).sum(1))


def test_forward_before_configure_model_is_refused():
    with pytest.raises(ValueError, match="configure_model"):
        LitGPT(TOY)(torch.zeros(1, 1, dtype=torch.int64))


def test_zero_loss_chunk_size_is_refused():
    with pytest.raises(ValueError, match=r"loss_chunk_mb=0 must be greater than 0\. Use infinity"):
        LitGPT(TOY, loss_chunk_mb=0)


def test_parameter_count_and_flops_match_formula():
    lit = LitGPT(LLAMA)
    assert lit.num_parameters == num_parameters(LLAMA)
    assert lit.flops_per_sample() == flops_per_sample(LLAMA, sequence_length=24)
    assert lit.flops_per_sample(12) < lit.flops_per_sample(24) / 2


def test_trained_model_generates_memorized_sequence(tmp_path):
    pl.seed_everything(0)
    lit = LitGPT(TOY, AdamWConfig(learning_rate=1e-2, warmup_steps=5))
    trainer = quiet_trainer(tmp_path, max_steps=60, max_epochs=-1, gradient_clip_val=1.0)
    trainer.fit(lit, pattern_loader(), pattern_loader())
    assert trainer.callback_metrics["train_loss"] < 0.02
    assert trainer.callback_metrics["val_loss"] < 0.02
    perplexity = trainer.callback_metrics["val_perplexity"].item()
    assert perplexity == pytest.approx(
        math.exp(trainer.callback_metrics["val_loss"].item()), rel=1e-5
    )
    # the cosine decay ends at the Trainer's max_steps
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3)
    (written,) = generate(
        lit, PATTERN[None, :3].tolist(), Sampling(temperature=0.0, max_new_tokens=10)
    )
    assert written == PATTERN[3:].tolist()
    assert trainer.test(lit, pattern_loader(), verbose=False)[0]["test_loss"] < 0.02
    predictions = trainer.predict(lit, pattern_loader())
    assert [p["counted"].sum(1).tolist() for p in predictions] == [[12, 12], [12, 12]]


def test_perplexity_is_weighted_by_tokens(tmp_path):
    lit, trainer = built(TOY), quiet_trainer(tmp_path)
    short = {
        "input_ids": PATTERN[None, :-1],
        "labels": torch.cat((PATTERN[1:3], torch.full((10,), -100)))[None],
    }
    long = {"input_ids": PATTERN[None, :-1].flip(1), "labels": PATTERN[None, 1:]}
    trainer.validate(lit, DataLoader([short, long], batch_size=None), verbose=False)
    losses = [built(TOY).training_step(batch, 0)["loss"].item() for batch in (short, long)]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    expected = math.exp((2 * losses[0] + 12 * losses[1]) / 14)
    assert trainer.callback_metrics["val_perplexity"].item() == pytest.approx(expected, rel=1e-5)


def test_endless_training_needs_decay_steps(tmp_path):
    endless = quiet_trainer(tmp_path, max_epochs=-1, max_steps=-1)
    with pytest.raises(ValueError, match=r"optimizer\.decay_steps"):
        endless.fit(LitGPT(TOY), pattern_loader())


def test_checkpoint_loads_without_pickled_classes(tmp_path):
    lit = LitGPT(TOY, AdamWConfig(learning_rate=1e-2, betas=(0.8, 0.9)))
    trainer = quiet_trainer(tmp_path, max_steps=2)
    trainer.fit(lit, pattern_loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    torch.load(tmp_path / "a.ckpt", weights_only=True)
    loaded = LitGPT.load_from_checkpoint(tmp_path / "a.ckpt")
    assert (loaded.config, loaded.optimizer_config) == (lit.config, lit.optimizer_config)
    assert all(
        torch.equal(value, lit.state_dict()[name]) for name, value in loaded.state_dict().items()
    )


class PatternData(pl.LightningDataModule):
    def __init__(self, vocabulary_size: int = 16) -> None:
        super().__init__()
        self.vocabulary_size = vocabulary_size

    def train_dataloader(self):
        return pattern_loader()


class LinkedCLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments(
            "data.vocabulary_size", "model.config.vocabulary_size", apply_on="instantiate"
        )


def test_module_is_configured_by_yaml_file(tmp_path):
    (tmp_path / "run.yaml").write_text(f"""
trainer: {{accelerator: cpu, devices: 1, max_steps: 2, logger: false, enable_progress_bar: false,
  enable_model_summary: false, default_root_dir: {tmp_path}}}
model:
  config: {{num_layers: 2, hidden_size: 32, num_heads: 4, sequence_length: 12, norm: rms, position: rope, mlp: swiglu}}
  optimizer: {{learning_rate: 1e-3, betas: [0.8, 0.99], warmup_steps: 1}}
""")
    arguments = ["fit", "--config", str(tmp_path / "run.yaml"), "--model.config.num_kv_heads=2"]
    cli = LinkedCLI(LitGPT, PatternData, args=arguments, save_config_callback=None)
    assert cli.model.config == GPTConfig(
        vocabulary_size=16,
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        sequence_length=12,
        norm="rms",
        position="rope",
        mlp="swiglu",
    )
    assert cli.model.optimizer_config == AdamWConfig(
        learning_rate=1e-3, betas=(0.8, 0.99), warmup_steps=1
    )
    cli.trainer.save_checkpoint(tmp_path / "a.ckpt")
    torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert LitGPT.load_from_checkpoint(tmp_path / "a.ckpt").config == cli.model.config
