"""Twelve hostile files of every kind; ci/hostile_files.py runs all of them."""

import os
import time
from functools import partial
from itertools import groupby

import pytest

from tests.hostile import Case, configurations, data, models, tokenizers
from tests.hostile.confined import CANARY, MOST_S, Confinement

pytestmark = pytest.mark.thorough

_OF_EACH = 12


def selection(cases):
    """Return cases spread evenly over each kind."""
    kinds = {
        kind: list(group)
        for kind, group in groupby(cases, key=lambda case: case.name.partition("/")[0])
    }
    return [
        group[place * len(group) // _OF_EACH]
        for group in kinds.values()
        for place in range(_OF_EACH)
    ]


@pytest.mark.parametrize(
    "cases",
    [data.cases, configurations.cases, tokenizers.cases, models.cases],
    ids=["data", "configurations", "tokenizers", "models"],
)
def test_hostile_files_are_refused_without_side_effects(cases, tmp_path):
    confinement = Confinement(tmp_path / "cases")
    outcomes = [confinement.run(case) for case in selection(cases())]
    assert not [(outcome.name, outcome.wrong) for outcome in outcomes if outcome.wrong]
    assert sum(bool(outcome.said) for outcome in outcomes) > len(outcomes) // 2


def follow(name, folder):
    (folder / name).read_bytes()


def allocate(folder):
    bytearray(300 << 20)[:: 1 << 12] = b"x" * (300 << 8)


def calculate(folder):
    began = time.process_time()
    while time.process_time() - began <= MOST_S:
        sum(range(10**6))


def remove(folder):
    (folder.parent / CANARY / "folder" / "letter.txt").unlink()


def start(folder):
    os.system("true")


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (partial(follow, f"../{CANARY}/secret.bin"), "outside: open"),
        (partial(follow, "/etc/hostname"), "outside: open"),
        (remove, "canary/folder/letter.txt"),
        (start, "started os.system"),
        (allocate, "MB"),
        (calculate, " s"),
        (lambda folder: os.kill(os.getpid(), 11), "signal 11"),
        (lambda folder: {}["key"], "KeyError of"),
        (lambda folder: None, "was accepted"),
    ],
)
def test_confinement_detects_violations(read, words, tmp_path):
    def read_it(folder):
        read(folder)

    outcome = Confinement(tmp_path / "cases").run(Case("any", lambda folder: None, read_it))
    assert words in outcome.wrong
