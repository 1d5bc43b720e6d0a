"""Host reads of GPU values. Each waits for all queued kernels, so a step waits once, at its end, in
every layout."""

import time
import weakref
from datetime import timedelta
from functools import partial
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics

from lightning_ptdp.attention.ring import RingAttention
from lightning_ptdp.data_parallel import buckets, reduction
from lightning_ptdp.models import AdamWConfig, GPTConfig, LitGPT
from lightning_ptdp.strategy import PTDPStrategy
from tests.fake_cuda import Waits, fake_cuda
from tests.parity import checks_of_rank_0

pytestmark = pytest.mark.thorough

P2 = {"pipeline_parallel_size": 2, "num_microbatches": 4}
HALF = {"precision": "bf16-true"}
DETERMINISTIC = {"deterministic": True}
LAYOUTS = {
    "one m4": (1, {"num_microbatches": 4}, {"accumulate_grad_batches": 2}),
    "d4": (4, {}, {}),
    "d4 two levels ZeRO m2": (
        4,
        {"num_microbatches": 2, "shard": "optimizer", "data_parallel_replicas": 2},
        {},
    ),
    "t2 d2 m2 masters": (4, {"tensor_parallel_size": 2, "num_microbatches": 2}, HALF),
    "t4 SP recomputed": (
        4,
        {
            "tensor_parallel_size": 4,
            "sequence_parallel": True,
            "tensor_overlap": 2,
            "recompute": "full",
        },
        HALF,
    ),
    "c4": (4, {"context_parallel_size": 4, "num_microbatches": 2}, DETERMINISTIC),
    "c2 d2 all to all": (
        4,
        {"context_parallel_size": 2, "context_parallel_attention": "all_to_all"},
        {},
    ),
    "p4": (4, {"pipeline_parallel_size": 4, "num_microbatches": 4}, {}),
    "p2 v2 d2 ZeRO": (
        4,
        {**P2, "virtual_pipeline_size": 2, "shard": "optimizer"},
        DETERMINISTIC,
    ),
    "p2 v2 d2 ZeRO-2": (4, {**P2, "virtual_pipeline_size": 2, "shard": "gradients"}, {}),
    "d2 ZeRO-3": (2, {"shard": "parameters"}, {}),
    "p2 v2 d2 ZeRO-3": (4, {**P2, "virtual_pipeline_size": 2, "shard": "parameters"}, {}),
    "p2 t2 SP ZB-H1": (
        4,
        {
            **P2,
            "tensor_parallel_size": 2,
            "sequence_parallel": True,
            "tensor_overlap": 3,
            "schedule": "zb_h1",
        },
        {**HALF, **DETERMINISTIC},
    ),
    "p2 d2 ZB-V": (
        4,
        {**P2, "virtual_pipeline_size": 2, "schedule": "zb_v"},
        {"accumulate_grad_batches": 2},
    ),
    "p2 c2": (4, {**P2, "context_parallel_size": 2}, {}),
}


ALLOWED = {
    ("engine/step_report.py read_numbers", "tolist"),  # on ranks with the last stage
    ("engine/sharing.py share", "tolist"),  # on other ranks
    ("strategy/stopping.py _read", "synchronize"),  # if nothing is read: for the last batch
}


class LitTokens(pl.LightningModule):
    """A typical user's module that logs, returns a dictionary and has a metric."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch, batch_idx):
        x = batch["input_ids"].float()[:, :4]
        y = self.layers(x)
        loss = y.square().mean()
        self.error(y, x.contiguous())
        self.log("error", self.error)
        self.log("train_loss", loss, prog_bar=True)
        self.log("largest", y.max(), reduce_fx="max")
        return {"loss": loss, "num_tokens": (x > 0).sum(), "mean": y.mean()}

    def validation_step(self, batch, batch_idx):
        self.log(
            "val_loss",
            self.layers(batch["input_ids"].float()[:, :4]).square().mean(),
            sync_dist=True,
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class LitManual(LitTokens):
    """A module with manual optimization."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layers(batch["input_ids"].float()[:, :4]).square().mean())
        optimizer.step()


class LitLlama(pl.LightningModule):
    """A module with a Hugging Face model, without padding."""

    def configure_model(self):
        import transformers

        sizes = {
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        self.model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_key_value_heads=2)
        )

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class LitPaddedLlama(LitLlama):
    """A module with a padding mask in two of eight samples."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        mask = torch.ones_like(batch["input_ids"])
        mask[:2, -3:] = 0
        return {**batch, "attention_mask": mask}


class LitFullLlama(LitLlama):
    """A module with a padding mask that hides nothing."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


class LitPackedLlama(LitLlama):
    """A module with two packed conversations in every sample."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        positions = torch.arange(batch["input_ids"].size(1)).remainder(5)
        return {**batch, "position_ids": positions.expand_as(batch["input_ids"]).clone()}


class Marks(pl.Callback):
    """Callback that starts a new list of waits at the start and the end of every batch."""

    def __init__(self, waits: Waits) -> None:
        self._batches = waits.batches
        self.begun = {"train": [], "val": []}

    def _begin(self, kind):
        self.begun[kind].append(len(self._batches))
        self._batches.append([])

    def on_train_batch_start(self, *_):
        self._begin("train")

    def on_train_batch_end(self, *_):
        self._batches.append([])

    def on_validation_batch_start(self, *_):
        self._begin("val")

    def on_validation_batch_end(self, *_):
        self._batches.append([])


def fit(rank, size, options, settings, module=None):
    """Train on a fake GPU and return the host's waits in each training and validation batch."""
    try:
        return _fit(rank, size, options, settings, module)
    finally:
        assert torch.are_deterministic_algorithms_enabled() == settings.get("deterministic", False)
        torch.use_deterministic_algorithms(False)


def _fit(rank, size, options, settings, module):
    torch.manual_seed(0)
    stages = options.get("pipeline_parallel_size", 1) * options.get("virtual_pipeline_size", 1)
    sizes = {
        "vocabulary_size": 32,
        "sequence_length": 8,
        "num_layers": max(2, stages),
        "hidden_size": 16,
        "num_heads": 4,
    }
    rows = [
        {"input_ids": row[:-1].clone(), "labels": row[1:].clone()}
        for row in torch.randint(32, (96, 9))
    ]
    loaders = [torch.utils.data.DataLoader(rows, batch_size=8) for _ in range(2)]
    # NCCL does not use gloo's replacements of two collectives.
    with fake_cuda(rank) as waits, mock.patch.object(reduction, "_is_gloo", return_value=False):
        marks = Marks(waits)
        trainer = pl.Trainer(
            strategy=PTDPStrategy(process_group_backend="gloo", **options),
            accelerator="gpu",
            devices=size,
            max_epochs=1,
            limit_train_batches=3,
            limit_val_batches=2,
            num_sanity_val_steps=0,
            gradient_clip_val=0.5 if module is not LitManual else None,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[marks],
            **settings,
        )
        model = (
            module()
            if module is not None
            else LitGPT(GPTConfig.gpt2(**sizes), AdamWConfig(learning_rate=1e-3))
        )
        with checks_of_rank_0(rank):
            trainer.fit(model, *loaders)
        return {
            kind: [waits.batches[place] for place in begun] for kind, begun in marks.begun.items()
        }


@pytest.mark.parametrize("name", LAYOUTS)
def test_step_waits_for_device_at_most_once(name, pool):
    """Some layouts use deterministic algorithms, which refuse some of torch's operations."""
    size, options, settings = LAYOUTS[name]
    _check(pool.run(fit, world_size=size, args=(size, options, settings)))


def _summed(rank, options):
    """Return the last sums over the two replicas: asynchronous or not, dtype."""
    sums = []
    all_reduce = dist.all_reduce

    def noting(tensor, *args, async_op=False, **kwargs):
        sums.append((async_op, tensor.dtype))
        return all_reduce(tensor, *args, async_op=async_op, **kwargs)

    with mock.patch.object(dist, "all_reduce", noting):
        fit(rank, 2, options, {}, LitTokens)
    return sums


def test_tokens_are_summed_before_gradients(pool):
    """A communicator runs in issue order, so the report would wait for the gradients' sums."""
    for sums in pool.run(_summed, world_size=2, args=({"num_microbatches": 2},)):
        tokens = sums.index((False, torch.float64))
        gradients = sums.index((True, torch.float32))
        assert tokens < gradients
        assert sums[tokens:].count((False, torch.float64)) == 3


def _recorded(rank, size, options):
    """Return the number of tensors that ``record_stream`` holds until the device is done."""
    with mock.patch("tests.fake_cuda._Streams.recorded") as recorded:
        fit(rank, size, options, {})
    return recorded.call_count


@pytest.mark.parametrize("nodes", [1, 2])
def test_sharded_gradients_are_free_as_soon_as_stream_waits(nodes, pool):
    """The host runs ahead, so that it would allocate the gradients of several microbatches."""
    options = {"shard": "gradients", "num_microbatches": 2, "data_parallel_replicas": nodes}
    size = 2 * nodes
    assert not any(pool.run(_recorded, world_size=size, args=(size, options)))


def _held_in_forwards(rank, size, options):
    """Return the number of gradients under a sum whose memory is held while a forward begins."""
    sums, held = [], []
    prepare, step = reduction.Reduction.prepare, LitTokens.training_step

    def preparing(self, gradients):
        sums.append(weakref.ref(gradients))
        return prepare(self, gradients)

    def stepping(self, *args):
        for _ in range(100):  # gloo's thread drops its reference shortly after its message
            alive = sum(gradients() is not None for gradients in sums)
            if not alive:
                break
            time.sleep(0.01)
        held.append(alive)
        return step(self, *args)

    with (
        mock.patch.object(reduction.Reduction, "prepare", preparing),
        mock.patch.object(LitTokens, "training_step", stepping),
        mock.patch.object(buckets, "_MOST_WAITING", 0),
    ):
        fit(rank, size, options, {}, LitTokens)
    assert sums
    return held


@pytest.mark.parametrize("nodes", [1, 2])
def test_large_sharded_gradients_are_free_in_next_forward(nodes, pool):
    options = {"shard": "gradients", "num_microbatches": 2, "data_parallel_replicas": nodes}
    size = 2 * nodes
    for held in pool.run(_held_in_forwards, world_size=size, args=(size, options)):
        assert len(held) == 6
        assert not any(held)


@pytest.mark.parametrize("name", ["one m4", "d4", "p2 d2 ZB-V"])
def test_user_module_waits_for_device_at_most_once(name, pool):
    size, options, _ = LAYOUTS[name]
    _check(pool.run(fit, world_size=size, args=(size, options, {}, LitTokens)))


def test_timed_validation_waits_for_device_at_most_once(pool):
    settings = {"val_check_interval": timedelta(days=1), "check_val_every_n_epoch": None}
    ranks = pool.run(fit, world_size=2, args=(2, {}, settings, LitTokens))
    _check([{"train": batches["train"]} for batches in ranks])


def test_manual_optimization_waits_for_device_at_most_once(pool):
    ranks = pool.run(fit, world_size=2, args=(2, {}, {}, LitManual))
    for batches in ranks:  # the second batch begins with a comparison of the replicas
        compared = "engine/copy_comparison.py"
        batches["train"][1] = [w for w in batches["train"][1] if not w.place.startswith(compared)]
    _check(ranks)


@pytest.mark.parametrize(
    ("size", "options"),
    [(1, {}), (2, {"tensor_parallel_size": 2}), (2, P2), (2, {})],
    ids=["one", "t2", "p2", "d2"],
)
def test_hugging_face_module_waits_for_device_at_most_once(size, options, pool):
    _check(pool.run(fit, world_size=size, args=(size, options, {}, LitLlama)))


def mixture(**options):
    return LitGPT(
        GPTConfig.gpt2(
            vocabulary_size=32,
            sequence_length=8,
            num_layers=2,
            hidden_size=16,
            num_heads=4,
            num_experts=4,
            experts_per_token=2,
            mlp="swiglu",
            bias=False,
            **options,
        ),
        AdamWConfig(learning_rate=1e-3),
    )


@pytest.mark.parametrize(
    ("size", "options", "reads"),
    [
        (2, {"expert_parallel_size": 2}, 2),
        (2, {"expert_parallel_size": 2, "recompute": "full"}, 2),
        (1, {}, 0),
    ],
    ids=["e2", "e2 recomputed", "e1"],
)
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_experts_wait_once_per_layer(size, options, reads, capacity, pool):
    """Two layers read the numbers of rows that are sent; the grouped kernel needs none."""
    module = partial(mixture, capacity_factor=capacity)
    for batches in pool.run(fit, world_size=size, args=(size, options, HALF, module)):
        for waits in batches["train"][1:]:
            experts = [wait for wait in waits if wait.place.startswith("expert_parallel/")]
            assert len(experts) == reads, waits
            assert {wait.place for wait in waits} - {place for place, _ in ALLOWED} <= {
                wait.place for wait in experts
            }


class LitOwnMasks(LitPaddedLlama):
    """A module that changes its padding mask, which no longer is that of the batch."""

    def training_step(self, batch, batch_idx):
        return super().training_step({**batch, "attention_mask": batch["attention_mask"] * 1}, 0)


def test_context_ranks_read_own_mask_once_for_all_layers(pool):
    """The masks of two layers are read once. The padding of the batch is not read at all."""
    options = {"context_parallel_size": 2}
    for batches in pool.run(fit, world_size=2, args=(2, options, {}, LitOwnMasks)):
        for waits in batches["train"]:
            reads = [wait for wait in waits if wait.place.startswith(("attention/", "context_"))]
            assert [read.what for read in reads] == ["tolist"], waits


@pytest.mark.parametrize("module", [LitLlama, LitPaddedLlama, LitFullLlama])
def test_context_ranks_read_no_mask_of_hugging_face_model(module, pool):
    """The first forward shows whether attention is causal. Later nobody reads a mask: neither this
    package nor the model, which would decide by its values whether it needs one."""
    options = {"context_parallel_size": 2, "num_microbatches": 2}
    _check(pool.run(fit, world_size=2, args=(2, options, {}, module)))


def _masked_calls(rank, module):
    calls = []
    attend = RingAttention.__call__

    def noting(self, call):
        calls.append(call.mask is not None)
        return attend(self, call)

    with mock.patch.object(RingAttention, "__call__", noting):
        fit(rank, 2, {"context_parallel_size": 2}, {}, module)
    return calls


class LitChanged(LitFullLlama):
    """A module whose hook hides tokens after the batch was moved to the device."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "attention_mask": batch["attention_mask"].tril(5)}


@pytest.mark.parametrize(
    ("module", "masked"), [(LitFullLlama, False), (LitPaddedLlama, True), (LitChanged, True)]
)
def test_mask_that_hides_nothing_reaches_no_kernel(module, masked, pool):
    """A kernel without a mask is faster. The mask's values are known from the host's batch, unless
    a hook may have changed them."""
    for calls in pool.run(_masked_calls, world_size=2, args=(module,)):
        assert set(calls[2:]) == {masked}


@pytest.mark.parametrize("attention", ["ring", "all_to_all"])
def test_context_ranks_read_no_mask_of_packed_chat(attention, pool):
    options = {
        "context_parallel_size": 2,
        "context_parallel_attention": attention,
        "num_microbatches": 2,
    }
    _check(pool.run(fit, world_size=2, args=(2, options, {}, LitPackedLlama)))


@pytest.mark.parametrize(
    ("options", "settings"), [({"check_finite": "raise"}, {}), ({}, {"precision": "16-mixed"})]
)
def test_finite_check_and_loss_scaler_wait_for_gradients(options, settings, pool):
    ranks = pool.run(fit, world_size=2, args=(2, {**P2, **options}, settings))
    for waits in (waits for batches in ranks for waits in batches["train"][1:]):
        report, decision = waits
        assert report.place in (
            "engine/step_report.py read_numbers",
            "engine/sharing.py share",
        )
        assert report.queued
        assert not decision.queued
        assert (
            decision.place.endswith(("engine/optimization.py complete", "amp.py optimizer_step"))
            and not decision.in_schedule
        )


def _check(ranks):
    for batches in ranks:
        # In the first batch of a shape the stages exchange shapes.
        for kind, (
            _,
            *later,
        ) in batches.items():
            assert len(later) == (2 if kind == "train" else 1)
            for waits in later:
                assert not any(wait.in_schedule for wait in waits), waits
                assert {(wait.place, wait.what) for wait in waits} <= ALLOWED
                assert len(waits) <= 1, waits
                if kind == "train":
                    # The report needs only forwards: the read does not wait for what follows.
                    assert all(wait.queued for wait in waits if wait.what == "tolist"), waits
