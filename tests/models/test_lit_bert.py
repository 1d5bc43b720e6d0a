"""LitBert in a single-process Trainer: losses, logged values, checkpoints and a toy task."""

import math

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_ptdp.callbacks import TrainPerplexity
from lightning_ptdp.metrics import MeanLoss
from lightning_ptdp.models import (
    AdamWConfig,
    BertConfig,
    LitBert,
    bert_flops_per_sample,
    num_parameters,
)
from tests.models.configs import SIZES
from tests.models.fits import quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are trying to `self.log"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]

CONFIG = BertConfig.megatron(**SIZES, init_std=0.1, dropout=0.0)


def batch(*, samples=4, length=12, seed=0, ignored=()):
    """Return a batch with a different number of predictions in every sample."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 61, (samples, length), generator=draw)
    labels = torch.full((samples, length), -100)
    positions = torch.zeros(samples, 5, dtype=torch.int64)
    orders = torch.randint(2, (samples,), generator=draw)
    for row in range(samples):
        places = torch.randperm(length - 1, generator=draw)[: 1 + row % 5] + 1
        if row not in ignored:
            labels[row, places], positions[row, : len(places)] = ids[row, places], places
        else:
            orders[row] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "masked_positions": positions,
        "next_sentence_label": orders,
    }


def built(**kwargs):
    torch.manual_seed(0)
    lit = LitBert(CONFIG, **kwargs)
    lit.configure_model()
    return lit


def test_loss_is_sum_of_two_means_over_predicted_tokens():
    lit, inputs = built(order_weight=0.5), batch(ignored=(2,))
    output = lit(inputs)
    counts = (inputs["labels"] != -100).sum(1)
    everywhere = lit({"input_ids": inputs["input_ids"]}).masked
    masked = F.cross_entropy(everywhere.flatten(0, 1), inputs["labels"].flatten())
    kept = torch.tensor([0, 1, 3])
    order = F.cross_entropy(
        output.order[kept], inputs["next_sentence_label"][kept], reduction="none"
    )
    result = lit.training_step(inputs, 0)
    assert result["num_tokens"].item() == counts.sum() == 1 + 2 + 4
    torch.testing.assert_close(
        result["loss"], masked + 0.5 * (order * counts[kept]).sum() / counts.sum()
    )
    without = {name: value for name, value in inputs.items() if name != "masked_positions"}
    torch.testing.assert_close(lit.training_step(without, 0)["loss"], result["loss"])


def test_loss_of_weighted_microbatches_equals_full_batch():
    lit, inputs = built(), batch(samples=6, ignored=(5,))
    whole = lit.training_step(inputs, 0)
    parts = [
        lit.training_step({key: value[i : i + 2] for key, value in inputs.items()}, 0)
        for i in (0, 2, 4)
    ]
    weighted = sum(part["loss"] * part["num_tokens"] for part in parts) / whole["num_tokens"]
    torch.testing.assert_close(weighted, whole["loss"])


def test_batch_without_labels_has_zero_loss_and_gradients():
    lit = built()
    result = lit.training_step(batch(ignored=(0, 1, 2, 3)), 0)
    assert (result["loss"].item(), result["num_tokens"].item()) == (0.0, 0)
    result["loss"].backward()
    assert all(p.grad is not None and not p.grad.any() for p in lit.parameters())


class Copies(Dataset):
    """Pairs of equal random segments, which reveal masked tokens; the last token is the order."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        half = torch.randint(5, 13, (4,), generator=draw)
        order = torch.randint(2, (), generator=draw)
        ids = torch.cat((torch.tensor([2]), half, torch.tensor([3]), half, 13 + order[None]))
        place = 6 + torch.randint(4, (1,), generator=draw)
        labels = torch.full((11,), -100)
        labels[place] = ids[place]
        ids[place] = 4
        types = (torch.arange(11) > 5).long()
        return {
            "input_ids": ids,
            "token_type_ids": types,
            "labels": labels,
            "masked_positions": place,
            "next_sentence_label": order,
        }


def test_training_solves_toy_task_and_logs_metrics(tmp_path):
    pl.seed_everything(0)
    sizes = {
        "vocabulary_size": 16,
        "sequence_length": 11,
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
    }
    config = BertConfig.megatron(**sizes, dropout=0.0, init_std=0.1)
    lit = LitBert(config, AdamWConfig(learning_rate=1e-2, warmup_steps=10, weight_decay=0.0))
    trainer = quiet_trainer(
        tmp_path, max_steps=160, max_epochs=-1, gradient_clip_val=1.0, callbacks=[TrainPerplexity()]
    )
    trainer.fit(
        lit, DataLoader(Copies(), batch_size=32, shuffle=True), DataLoader(Copies(), batch_size=60)
    )
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert logged["val_masked_accuracy"] > 0.95
    assert logged["val_order_accuracy"] > 0.99
    assert logged["val_loss"] == pytest.approx(
        logged["val_masked_loss"] + logged["val_order_loss"], rel=1e-5
    )
    assert logged["train_perplexity"] == pytest.approx(
        math.exp(logged["train_masked_loss"]), rel=1e-5
    )
    tested = trainer.test(lit, DataLoader(Copies(), batch_size=7), verbose=False)[0]
    assert {name.removeprefix("test_") for name in tested} == {
        n.removeprefix("val_") for n in logged if n.startswith("val_")
    }
    for name, value in tested.items():
        assert value == pytest.approx(logged[name.replace("test_", "val_")], rel=1e-4), name
    (first, *_) = trainer.predict(lit, DataLoader(Copies(), batch_size=8))
    expected = next(iter(DataLoader(Copies(), batch_size=8)))
    assert (first["order_logits"].argmax(1) == expected["next_sentence_label"]).all()
    assert torch.equal(first["tokens"] >= 0, expected["labels"] >= 0)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = LitBert(**torch.load(tmp_path / "x.ckpt", weights_only=True)["hyper_parameters"])
    assert (again.config, again.optimizer_config, again.order_weight) == (
        lit.config,
        lit.optimizer_config,
        lit.order_weight,
    )


def test_sizes_match_formula_and_invalid_use_is_refused():
    lit = LitBert(CONFIG)
    assert lit.num_parameters == num_parameters(CONFIG)
    assert lit.flops_per_sample(12) == bert_flops_per_sample(CONFIG, sequence_length=12)
    with pytest.raises(ValueError, match="configure_model"):
        lit(batch())
    with pytest.raises(ValueError, match="order_weight=-1"):
        LitBert(CONFIG, order_weight=-1)


def test_mean_loss_is_weighted_by_tokens():
    metric = MeanLoss()
    metric.update(torch.tensor(2.0), 3)
    metric.update(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 0.0]))
    assert metric.compute().item() == pytest.approx(7 / 4)
