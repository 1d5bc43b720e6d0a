"""Outcomes and table of ``ci/third_party.py``, without the third-party packages."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ci"))

from marked_table import write_between_marks
from third_party import (
    LAYOUTS,
    MODULES,
    PACKAGE,
    Outcome,
    describe,
    first_sentence,
    outcome_of,
    table_of,
)

from lightning_ptdp.verification import Cause, Report
from lightning_ptdp.verification.compare import Difference


def traceback_of(file, error):
    return (
        'Traceback (most recent call last):\n  File "/elsewhere.py", line 1, in a\n  File '
        f'"{file}", line 2, in b\n{error}\n'
    )


@pytest.mark.parametrize(
    ("file", "error", "launched", "kind"),
    [
        (PACKAGE / "config.py", ValueError("t=2 is too many; use t=1"), False, "refused"),
        (PACKAGE / "config.py", ValueError("t=2 is too many; use t=1"), True, "late"),
        (PACKAGE / "config.py", AttributeError("none"), False, "obscure"),
        (Path("/torch/nn.py"), ValueError("bad shape"), False, "obscure"),
    ],
)
def test_errors_are_classified_by_origin_and_time(file, error, launched, kind):
    text = traceback_of(file, f"{type(error).__name__}: {error}")
    assert describe(error, text, launched=launched).kind == kind


def test_rank_error_is_read_from_traceback():
    error = type("ProcessRaisedException", (Exception,), {})
    text = traceback_of(
        PACKAGE / "engine" / "replica_step.py",
        "lightning_ptdp.pipeline.stage_run.CutError: cut elsewhere. Use p=1",
    )
    assert describe(error(text), text, launched=True) == Outcome("late", "cut elsewhere. Use p=1")


@pytest.mark.parametrize(
    ("kind", "cause", "outcome"),
    [
        ("loss", "random numbers", "random"),
        ("random numbers", "random numbers", "different"),
        ("loss", "coupled samples", "different"),
        (None, "random numbers", "equal"),
    ],
)
def test_outcome_of_comparison(kind, cause, outcome):
    compared = [
        Difference(
            kind=kind or "loss",
            step=0,
            name="loss",
            point="",
            error=1.0 if kind else 0.0,
            tolerance=1e-5,
            place="rank 0",
            text="1 and 2",
        )
    ]
    report = Report(
        layout="m2", steps=1, compared=compared, causes=[Cause(name=cause, text="they are")]
    )
    assert outcome_of(report).kind == outcome


def test_first_sentence_is_shortened():
    assert first_sentence("too many\nstages in model.0. Use fewer") == "too many stages in model.0"
    assert first_sentence("pipeline_parallel_size=2 cannot cut Net: it is no chain. Use 1") == (
        "it is no chain"
    )
    assert (
        first_sentence("a.1, a.2 average statistics over the batch: no")
        == "batch normalization is over the batch"
    )
    assert (
        first_sentence("saving the checkpoint /x/y.ckpt failed: rank 0: it is no number: no")
        == "when saving, it is no number"
    )


def test_table_numbers_each_reason_once(tmp_path):
    found = {
        name: dict.fromkeys(LAYOUTS, Outcome("equal"))
        | {"t2": Outcome("refused", "no plan. Give one")}
        for name in [*MODULES][:2]
    }
    page = tmp_path / "page.md"
    page.write_text("before <!-- it: begin -->old<!-- it: end --> after")
    write_between_marks(page, "it", table_of(found))
    text = page.read_text()
    assert text.count("| yes | yes | yes | refused [1] |") == 2 and text.count("1. no plan") == 1
    assert "old" not in text and text.startswith("before") and text.endswith("after")
    with pytest.raises(ValueError, match="<!-- other: begin -->"):
        write_between_marks(page, "other", "")
