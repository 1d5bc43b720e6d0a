"""``PTDPStrategy(verify="first_step")``."""

import lightning.pytorch as L
import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.verification import VerificationError
from tests.verification.toys import Lit, Summed, loader

pytestmark = pytest.mark.thorough


def trainer(folder, **options):
    return L.Trainer(
        strategy=PTDPStrategy(num_microbatches=2, verify="first_step"),
        accelerator="cpu",
        max_steps=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def test_difference_aborts_before_training(tmp_path):
    started = trainer(tmp_path, devices=1)
    with pytest.raises(VerificationError, match="sum over samples"):
        started.fit(Summed(), loader())
    assert started.global_step == 0


def test_equal_layout_trains(tmp_path):
    started, module = trainer(tmp_path, devices=1, gradient_clip_val=0.1), Lit()
    started.fit(module, loader())
    assert started.global_step == 2
    assert not list(tmp_path.iterdir())


def test_first_step_is_refused_on_several_nodes(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    with pytest.raises(
        MisconfigurationException, match=r"verify='first_step' forks processes .* num_nodes=2"
    ):
        trainer(tmp_path, devices=1, num_nodes=2).fit(Lit(), loader())


def test_unknown_verify_value_is_refused():
    with pytest.raises(ValueError, match="verify"):
        PTDPStrategy(verify="always")
