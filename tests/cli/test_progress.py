"""Progress output of ``ptdp fit``."""

import pytest

pytestmark = pytest.mark.thorough


def test_fit_prints_step_lines_unless_replaced_or_disabled(ptdp, config):
    fit = ["fit", "--config", config, "--sample=null", "--trainer.max_steps=2"]
    code, out, err = ptdp(*fit, "--trainer.enable_progress_bar=true")
    assert code == 0, err
    assert "step 1/2: train_loss" in out
    assert ", ETA 0:00:" in out
    last = next(line for line in out.splitlines() if line.startswith("step 2/2:"))
    assert "tokens/s" in last
    for other in ("--trainer.callbacks+=TQDMProgressBar", "--trainer.enable_progress_bar=false"):
        show = ["--trainer.enable_progress_bar=true"] if "callbacks" in other else []
        code, out, err = ptdp(*fit, *show, other)
        assert code == 0, err
        assert "step 2/2:" not in out
