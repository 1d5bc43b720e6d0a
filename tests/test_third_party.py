"""Outcomes and table of ``ci/third_party.py``, without its packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ci"))

from marked_table import write_between_marks
from third_party import LAYOUTS, MODULES, PACKAGE, Outcome, describe, first_sentence, table_of


def traceback_of(file: Path, error: str) -> str:
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
def test_errors_of_the_package_are_refusals(
    file: Path, error: Exception, launched: bool, kind: str
) -> None:
    text = traceback_of(file, f"{type(error).__name__}: {error}")
    assert describe(error, text, launched=launched).kind == kind


def test_errors_of_a_rank_are_read_from_its_traceback() -> None:
    error = type("ProcessRaisedException", (Exception,), {})
    text = traceback_of(
        PACKAGE / "engine" / "replica_step.py",
        "lightning_ptdp.pipeline.refusals.CutError: cut elsewhere. Use p=1",
    )
    assert describe(error(text), text, launched=True) == Outcome("late", "cut elsewhere. Use p=1")


def test_first_sentence() -> None:
    assert first_sentence("too many\nstages in model.0. Use fewer") == "too many stages in model.0"
    assert (
        first_sentence("a.1, a.2 normalize over the batch: no")
        == "batch normalization is over the batch"
    )
    assert (
        first_sentence("saving the checkpoint /x/y.ckpt failed: rank 0: it is no number: no")
        == "when saving, it is no number"
    )


def test_the_table_numbers_each_reason_once(tmp_path: Path) -> None:
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
