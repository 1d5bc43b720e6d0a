"""Progress display of training."""

import copy
import logging
import re
import sys

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_ptdp.callbacks import StepProgress, Throughput
from lightning_ptdp.callbacks.step_progress import describe
from tests.callbacks.toys import Tokens
from tests.conformance.toys import LitNet, loader


def fit(*callbacks, **options):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    trainer = Trainer(callbacks=[*callbacks], **(quiet | options))
    trainer.fit(Tokens())
    return trainer


def test_progress_lines_count_optimizer_steps(capsys):
    fit(StepProgress(), Throughput(), max_steps=7, log_every_n_steps=3, accumulate_grad_batches=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 3/7", "step 6/7", "step 7/7"]
    assert all("tokens/s" in line for line in lines)
    assert [bool(re.search(r", ETA 0:00:0\d$", line)) for line in lines] == [True, True, False]


@pytest.mark.parametrize("style", ["rich", "tqdm"])
def test_bar_ends_at_last_step_despite_validation(capsys, style):
    trainer = Trainer(
        callbacks=[StepProgress(style=style)],
        max_epochs=2,
        log_every_n_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(LitNet(), loader(), loader())
    said = capsys.readouterr().out
    assert "8/8" in said
    assert "-2" not in said, "Lightning's own bar is shown"


def test_log_messages_print_above_terminal_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich assume a terminal
    log, handler = logging.getLogger("tests.progress"), logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(log, "handlers", [handler])
    before = handler.stream

    class Tells(Callback):
        def on_train_batch_end(self, *_):
            log.warning("a message")

    fit(StepProgress(style="rich"), Tells(), max_steps=1)
    said = capsys.readouterr()
    assert re.search(r"^\S*a message\S*\s*$", said.out, re.MULTILINE), (
        "the message is not on a separate line"
    )
    assert "a message" not in said.err
    assert handler.stream is before


def test_refresh_rate_and_last_step_are_shown():
    shown = []

    class Recorded(StepProgress):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            self._display.show = lambda step, text: shown.append((step, text))

    fit(Recorded(style="lines", refresh_rate=2), max_steps=5)
    assert [step for step, _ in shown] == [2, 4, 5]


def test_disabled_progress_is_silent_and_can_be_copied(capsys):
    progress = StepProgress(style="lines")
    progress.disable()
    trainer = fit(progress, max_steps=2, log_every_n_steps=1)
    assert "step" not in capsys.readouterr().out
    copied = copy.deepcopy(trainer.progress_bar_callback)
    assert isinstance(copied, StepProgress)


def test_metrics_are_formatted_on_one_line():
    metrics = {"train_loss": 3.14159, "tokens_per_s": 12345.0, "mfu": 0.4123, "name": "text"}
    assert describe(metrics) == "train_loss 3.142, 12.3k tokens/s, MFU 41.2%"
    assert describe({"tokens_per_s": 1.5e6}) == "1.5M tokens/s"
    assert describe({}) == ""


def test_mfu_is_logged_only_with_peak_tflops():
    trainer = fit(Throughput(peak_tflops=0.5), max_steps=4, enable_progress_bar=False)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert found["mfu"] == pytest.approx(found["model_tflops_per_s"] / 0.5)
    assert "mfu" not in fit(Throughput(), max_steps=4, enable_progress_bar=False).callback_metrics


@pytest.mark.parametrize(("option", "value"), [("style", "fancy"), ("refresh_rate", 0)])
def test_invalid_options_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        StepProgress(**{option: value})
