"""``lightning_ptdp.verify``: correct modules are equal, wrong ones are reported with a cause."""

import psutil
import pytest
import torch
from torch import nn

from lightning_ptdp import PTDPError, PTDPStrategy, verify
from lightning_ptdp.verification import VerificationError
from tests.tiny_gpt import LitValidated, Run
from tests.verification import toys
from tests.verification.toys import Lit, LitAdam, LitClocked, LitCounted, LitNoisy, loader, tokens

pytestmark = pytest.mark.thorough

D2 = {"devices": 2}
M2 = {"num_microbatches": 2}
P2 = {"pipeline_parallel_size": 2, "num_microbatches": 2}
T2 = {"tensor_parallel_size": 2}
C2 = {"context_parallel_size": 2}
LIMIT = 120.0


def report(module, layout, **trainer):
    layout = dict(layout)
    devices = layout.pop("devices", None)
    data = {"train_dataloaders": loader(shuffle=True), "val_dataloaders": loader(8)}
    options = {**data, "devices": devices, "accelerator": "cpu", "limit_s": LIMIT, **trainer}
    return verify(module, strategy=PTDPStrategy(**layout), **options)


@pytest.fixture(autouse=True)
def same_batches(monkeypatch):
    """Fix the seed by which loaders shuffle; other tests in this process set it."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")


@pytest.mark.parametrize(
    ("module", "layout", "trainer"),
    [
        (Lit, M2, {}),
        (Lit, T2, {"gradient_clip_val": 0.1}),
        (Lit, {**T2, **P2}, {}),
        (
            LitAdam,
            {**D2, "shard": "optimizer"},
            {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        ),
        (LitCounted, D2, {}),
        (LitCounted, {**P2, "devices": 4}, {}),
        (
            lambda: LitValidated(Run()),
            C2,
            {"train_dataloaders": tokens(), "val_dataloaders": tokens(8)},
        ),
        (lambda: Lit(dropout=0.5), {**P2, "virtual_pipeline_size": 2}, {}),
        (LitNoisy, M2, {}),
        (LitAdam, P2, {"precision": "bf16-true"}),
        (LitNoisy, P2, {}),
        (toys.LitRecurrent, M2, {}),
        (toys.LitRounding, M2, {"precision": "64-true"}),
        (toys.LitLayered, P2, {}),
        (toys.LitDecayed, T2, {"accumulate_grad_batches": 2}),
        (toys.LitFrozen, P2, {"gradient_clip_val": 0.1}),
        (toys.LitTied, P2, {}),
        (toys.LitAveraged, D2, {}),
        (toys.LitManual, D2, {}),
        (toys.LitScheduled, {**P2, "virtual_pipeline_size": 2}, {}),
        (toys.LitMeasured, D2, {}),
        (
            Lit,
            {**P2, "recompute": "full"},
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        ),
    ],
    ids=[
        *(
            "m",
            "t, clipped",
            "t p",
            "d sharded",
            "d tokens",
            "d p tokens",
            "c",
            "dropout",
            "noise",
            "bf16",
        ),
        *(
            "noise p",
            "recurrent m",
            "rounding m",
            "layers' rates p",
            "decay t",
            "frozen p",
            "tied p",
            "average d",
            "manual d",
            "rates p v",
            "metric d",
        ),
        "recomputed, clipped by value p",
    ],
)
def test_correct_module_is_equal(module, layout, trainer):
    found = report(module(), layout, **trainer)
    assert found.equal, str(found)
    kinds = {one.kind for one in found.compared}
    assert {
        "loss",
        "gradient",
        "weight",
        "logged value",
        "metric",
        "optimizer option",
        "initial value",
    } <= kinds


def test_gpt_with_token_counts_and_warmup_is_equal():
    layout = {**T2, **P2, "virtual_pipeline_size": 2, "num_microbatches": 4}
    data = {"train_dataloaders": tokens(), "val_dataloaders": tokens(8)}
    found = report(LitValidated(Run()), layout, gradient_clip_val=0.05, **data)
    assert found.equal, str(found)


@pytest.mark.parametrize(
    ("module", "layout", "cause"),
    [
        (toys.EntropyNoise, M2, "random numbers"),
        (toys.UnseededGenerator, D2, "random numbers"),
        (lambda: Lit(norm=nn.BatchNorm1d), D2, "buffers"),
        (toys.Penalty, T2, "parameters in the step"),
        (toys.ClippedByHand, T2, "gradients changed by hand"),
        (toys.Shifted, C2, "label shift"),
        (toys.Contrastive, M2, "coupled samples"),
        (toys.Summed, D2, "sum over samples"),
        (toys.ScaledRate, P2, "optimizer groups"),
        (toys.Counting, M2, "hidden state"),
        (toys.Uncounted, D2, "uneven labels"),
        (toys.Normalized, T2, "optimizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_wrong_module_is_reported_with_cause(module, layout, cause):
    try:
        data = {"train_dataloaders": tokens(), "val_dataloaders": None} if layout is C2 else {}
        found = report(module(), layout, **data)
    except (PTDPError, ValueError) as error:
        # The strategy may refuse some of these modules instead.
        if cause not in (
            "parameters in the step",
            "label shift",
            "optimizer",
            "gradients changed by hand",
        ):
            raise
        pytest.skip(f"refused: {error}")
    assert not found.equal
    assert [one.name for one in found.causes][:1] == [cause], str(found)
    assert cause in str(found)


def test_logged_time_is_excluded_with_note():
    found = report(LitClocked(), M2)
    assert found.equal, str(found)
    assert any("clock" in note for note in found.notes)


def test_unjoinable_batches_are_accumulated():
    data = {"train_dataloaders": loader(collate_fn=toys.Graph), "val_dataloaders": None}
    found = report(Lit(), D2, **data, accumulate_grad_batches=2)
    assert found.equal, str(found)
    assert any("accumulates gradients over the replicas' batches" in note for note in found.notes)
    assert {"loss", "gradient", "weight"} <= {one.kind for one in found.compared}


def test_verify_takes_arguments_of_fit():
    assert verify(
        Lit(),
        loader(),
        loader(8),
        strategy=PTDPStrategy(num_microbatches=2),
        steps=1,
        accelerator="cpu",
    ).equal
    found = verify(
        Lit(), toys.Data(), strategy=PTDPStrategy(num_microbatches=2), steps=1, accelerator="cpu"
    )
    assert found.equal, str(found)
    with pytest.raises(ValueError, match="trainer: not an option"):
        verify(Lit(), loader(), strategy=PTDPStrategy(), trainer={"devices": 2})


def test_returned_label_count_is_no_cause():
    found = report(toys.ContrastiveCounted(), M2)
    assert [one.name for one in found.causes] == ["coupled samples"], str(found)


def test_report_draws_png(tmp_path):
    pytest.importorskip("matplotlib")
    found = report(toys.Summed(), M2)
    found.draw(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "only m" in str(found)


def test_reduced_number_of_blocks_is_noted():
    found = report(Lit(), P2, blocks=2)
    assert found.equal, str(found)
    assert any("2 blocks" in note for note in found.notes)
    assert not any("blocks.2" in one.name for one in found.compared)


class Waiting(Lit):
    def loss(self, batch):
        if self.global_rank == 1:
            torch.distributed.new_group([1]).wait()  # fails on one rank only
        return super().loss(batch)


def test_verify_leaves_no_processes_and_module_unchanged():
    module, here = Lit(), psutil.Process()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    children = set(here.children(recursive=True))
    with pytest.raises(PTDPError):
        report(Waiting(), D2)
    assert report(module, D2).equal
    assert set(here.children(recursive=True)) <= children
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    assert "training_step" not in vars(module)


def test_training_over_time_limit_is_aborted():
    with pytest.raises(VerificationError, match="limit_s"):
        report(Lit(), D2, limit_s=0.02)


def test_impossible_layouts_are_refused():
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        report(Lit(), {**T2, "devices": 3})
    for name, value in {"steps": 0, "blocks": -1, "limit_s": 0.0}.items():
        with pytest.raises(ValueError, match=f"{name}={value}"):
            verify(Lit(), strategy=PTDPStrategy(), **{name: value})
