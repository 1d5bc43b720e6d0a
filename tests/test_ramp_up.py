"""Training with a growing global batch, in several layouts and resumed within the ramp."""

from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ptdp.data import TextDataModule
from lightning_ptdp.models import AdamWConfig, GPTConfig, LitGPT
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.world.batch_size import RampUp
from tests.data.conftest import write_corpus
from tests.parity import make_trainer

P2 = {"pipeline_parallel_size": 2}
RAMP = RampUp(start=4, stop=16, increment=4, samples=48)
STEPS = 9


class Losses(L.Callback):
    """Callback that records loss, samples and learning rate of every step."""

    def __init__(self):
        self.losses = []
        self.rows = []
        self.rates = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rows.append(len(batch["input_ids"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, *args):
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


def data(folder):
    return TextDataModule(
        data_dir=f"{folder}/store",
        source=f"{folder}/text",
        vocabulary_size=320,
        validation_fraction=0.1,
        sequence_length=16,
        global_batch_size=RAMP.stop,
        micro_batch_size=2,
        ramp_up={"start": RAMP.start, "increment": RAMP.increment, "samples": RAMP.samples},
    )


def fit(rank, folder, world_size, layout, steps=STEPS, ckpt_path=None):
    """Train and return losses, rows, learning rates and the number of consumed samples.

    Without ``ckpt_path``, a checkpoint is saved after step 4.
    """
    L.seed_everything(3)
    losses, module = Losses(), data(folder)
    saving = ModelCheckpoint(
        f"{folder}/saved", every_n_train_steps=4, save_top_k=-1, filename="{step}"
    )
    strategy = PTDPStrategy(**layout, micro_batch_size=2)
    trainer = make_trainer(
        strategy,
        world_size,
        max_steps=steps,
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[losses] if ckpt_path else [losses, saving],
        enable_checkpointing=ckpt_path is None,
        default_root_dir=folder,
    )
    config = GPTConfig.gpt2(
        vocabulary_size=320, sequence_length=16, num_layers=2, hidden_size=16, num_heads=2
    )
    lit = LitGPT(config, AdamWConfig(learning_rate=1e-2, warmup_samples=8))
    trainer.fit(lit, datamodule=module, ckpt_path=ckpt_path)
    assert trainer.global_step == steps
    return losses.losses, losses.rows, losses.rates, module.state_dict()["consumed_samples"]


@pytest.fixture(scope="module")
def one(pool, tmp_path_factory):
    """Return a folder with the prepared text and the result of a single process."""
    folder = tmp_path_factory.mktemp("ramp")
    write_corpus(folder / "text", documents=4)
    data(str(folder)).prepare_data()
    return str(folder), pool.run(fit, world_size=1, args=(str(folder), 1, {}))[0]


def test_single_process_follows_ramp(one):
    _, (losses, rows, rates, consumed) = one
    assert rows == [RAMP.global_batch(RAMP.consumed(step)) for step in range(STEPS)]
    assert sorted(set(rows)) == list(RAMP.sizes)
    assert consumed == RAMP.consumed(STEPS)
    # The warm-up of eight samples takes two steps, and the cosine ends with the last step.
    assert rates[:2] == pytest.approx([5e-3, 1e-2])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] > 1e-3
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, P2), (2, {"shard": "optimizer"})], ids=["p2", "d2"]
)
def test_ramp_is_equal_in_every_layout(pool, one, world_size, layout):
    folder, (losses, rows, rates, consumed) = one
    replicas = 1 if layout == P2 else world_size
    results = pool.run(fit, world_size=world_size, args=(folder, world_size, layout))
    for rank in range(world_size):
        assert [replicas * size for size in results[rank][1]] == rows
        assert results[rank][2] == rates
        assert results[rank][3] == consumed
    found = torch.tensor([result[0] for result in results], dtype=torch.float64)
    assert torch.allclose(
        found.mean(0) if replicas > 1 else found[-1],
        torch.tensor(losses, dtype=torch.float64),
        atol=2e-5,
    )


def test_checkpoint_within_ramp_resumes_in_other_layout(pool, one):
    folder, (losses, rows, rates, consumed) = one
    saved = Path(folder, "saved", "step=4.ckpt")
    resumed = pool.run(fit, world_size=2, args=(folder, 2, P2, STEPS, str(saved)))[-1]
    assert resumed[0] == pytest.approx(losses[4:], abs=2e-5)
    assert resumed[1:] == (rows[4:], rates[4:], consumed)
