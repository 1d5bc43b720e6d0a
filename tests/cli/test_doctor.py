"""``ptdp doctor``."""

import json

import pytest

from lightning_ptdp.doctor import Check, Inspection, Status, render
from lightning_ptdp.doctor.inspection import Section, _limited


def test_full_inspection_passes_and_leaves_no_files(ptdp, tmp_path, prepared):
    code, out, _ = ptdp(
        "doctor", "--root-dir", str(tmp_path), "--data-dir", str(prepared), "--json"
    )
    found = json.loads(out)
    failed = [
        check
        for section in found["sections"]
        for check in section["checks"]
        if check["status"] == "failed"
    ]
    assert (code, failed, found["ok"]) == (0, [], True)
    titles = [section["title"].partition(" ")[0] for section in found["sections"]]
    assert titles == ["installation", "machine", "devices", "folders", "ranks"]
    assert {one["operation"] for one in found["measurements"]} == {
        "send 0 to 1",
        "all-reduce",
        "reduce-scatter",
        "all-gather",
    }
    assert list(tmp_path.iterdir()) == []


def test_failed_check_sets_exit_code_and_shows_fix(ptdp, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, _ = ptdp("doctor", "--devices", "1", "--root-dir", str(tmp_path / "file"))
    assert code == 1
    assert "-> use a folder with write permission" in out
    assert out.rstrip().endswith("3 failed")


@pytest.mark.parametrize(("option", "value"), [("--devices", "0"), ("--timeout", "-1")])
def test_out_of_range_number_is_refused(ptdp, option, value):
    code, _, err = ptdp("doctor", option, value)
    assert (code, option in err) == (2, True)


def test_columns_are_aligned():
    checks = (
        Check(subject="a", status=Status.OK, found="found"),
        Check(subject="longer", status=Status.WARNING, found="found", remedy="remedy"),
    )
    lines = render(Inspection(sections=(Section(title="title", checks=checks),))).splitlines()
    assert lines[:4] == [
        "title",
        "  ok       a       found",
        "  warning  longer  found",
        "                   -> remedy",
    ]
    assert lines[-1] == "1 ok, 1 warning, 0 failed"


def test_unresponsive_file_system_fails_check():
    import threading

    def dead():
        threading.Event().wait()
        return ()

    (check,) = _limited("folders", 0.5, dead, lambda check: (check,))
    assert (check.status, check.found) == (Status.FAILED, "no answer within 0.5 s")
