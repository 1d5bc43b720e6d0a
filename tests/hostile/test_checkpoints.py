"""A sample of the hostile checkpoints and exports, because all of them take a minute."""

import time
from itertools import islice

from lightning_ptdp.checkpoint import CheckpointError
from tests.hostile.checkpoints import cases

_EVERY = 31  # coprime to the numbers of false values and readers


def test_hostile_checkpoints_are_refused_quickly_by_name(tmp_path):
    (tmp_path / "canary").mkdir()
    wrong = []
    for number, case in enumerate(islice(cases(tmp_path / "made"), 0, None, _EVERY)):
        folder = tmp_path / str(number)
        folder.mkdir()
        case.write(folder)
        began = time.process_time()
        try:
            case.read(folder)
            said = "" if case.harmless else "was accepted"
        except CheckpointError as error:
            said = (
                ""
                if str(folder) in str(error) or "configuration" in str(error)
                else f"names no file: {error}"
            )
        if said or time.process_time() - began > 1:
            wrong.append(f"{case.name}: {said or time.process_time() - began}")
    assert not wrong
    assert list((tmp_path / "canary").iterdir()) == []


def test_over_1000_cases_have_unique_names(tmp_path):
    names = [case.name for case in cases(tmp_path)]
    assert len(names) == len(set(names)) > 1000
