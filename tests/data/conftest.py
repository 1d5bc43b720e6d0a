"""Fixtures: a tiny corpus and the data prepared from it."""

import random
import shutil
from pathlib import Path

import pytest

from lightning_ptdp.data import PrepareConfig, prepare

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "green",
    "cats",
    "count",
    "stars",
]


def write_corpus(folder: Path, *, documents: int = 40, seed: int = 0) -> Path:
    """Write a folder of text files with at most 120 lines each."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        lines = [
            " ".join(draw.choices(WORDS, k=draw.randint(3, 12)))
            for _ in range(draw.randint(20, 120))
        ]
        (folder / f"document{number:03}.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Return the folder of the tiny corpus."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture(scope="session")
def prepared(corpus, tmp_path_factory):
    """Return the tiny corpus prepared in several chunks (read-only)."""
    return prepare(config_of(corpus, tmp_path_factory.mktemp("prepared") / "store"))


@pytest.fixture
def store(prepared, tmp_path):
    """Return a copy of the prepared folder that a test may damage."""
    return Path(shutil.copytree(prepared.folder, tmp_path / "store"))


def config_of(corpus: Path, output: Path, **changes: object) -> PrepareConfig:
    """Return settings that fit the tiny corpus."""
    settings = {"vocabulary_size": 320, "chunk_tokens": 5000, "validation_fraction": 0.1, **changes}
    return PrepareConfig(output=output, source=str(corpus), **settings)
