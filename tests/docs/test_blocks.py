"""Every Python, shell and YAML block of the README and of docs/ runs."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import find_blocks, run_blocks
from tests.pool import Pool

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
WORDS = [
    "the",
    "a",
    "stage",
    "rank",
    "layer",
    "sends",
    "waits",
    "holds",
    "its",
    "gradient",
    "forward",
    "backward",
    "then",
    "of",
]
# A block that cannot run in a test needs a reason in front of it; a new one is a decision, made
# here.
MOST_NOT_RUN = 6
# A block takes three seconds, and ten times as long on a busy machine.
BLOCK_LIMIT_S = 40


@pytest.fixture(scope="module")
def unused() -> Iterator[Pool]:
    """A worker that nothing else has used: blocks fork processes, and threads of earlier tests
    would not live on in them."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what all pages use, with a text on which a tokenizer and a model of a second can
    be trained."""
    shared = tmp_path_factory.mktemp("shared")
    folder = shared / "text"
    folder.mkdir()
    draw = random.Random(0)
    for number in range(40):
        (folder / f"{number}.txt").write_text(
            "\n".join(" ".join(draw.choices(WORDS, k=12)) + "." for _ in range(20))
        )
    return shared


@pytest.mark.parametrize("name", [name for name, path in PAGES.items() if find_blocks(path, name)])
def test_the_blocks_of_a_page_run(name: str, unused: Pool, shared: Path, tmp_path: Path) -> None:
    blocks = find_blocks(PAGES[name], name)
    unused.run(
        run_blocks,
        world_size=1,
        args=(blocks, str(tmp_path), str(shared)),
        limit=min(BLOCK_LIMIT_S * len(blocks), 280),
    )


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    not_run = [
        block
        for name, path in PAGES.items()
        for block in find_blocks(path, name)
        if block.not_run is not None
    ]
    assert all(len(block.not_run or "") > 10 for block in not_run)
    assert len(not_run) <= MOST_NOT_RUN, "\n".join(
        f"{block.place}: {block.not_run}" for block in not_run
    )


def test_the_benchmarks_that_are_named_are_there() -> None:
    text = PAGES["docs/benchmarks.md"].read_text(encoding="utf-8")
    named = set(re.findall(r"(?:ci/benchmarks/|`)(\w+\.py)`?", text)) | set(
        re.findall(r"(?<=for what in )[\w ]+(?=;)", text)
    )
    files = {f"{name}.py" for words in named for name in words.removesuffix(".py").split()}
    assert len(files) > 8
    assert not [file for file in files if not (ROOT / "ci" / "benchmarks" / file).exists()]
    assert not [
        file
        for file in re.findall(r"(?:tests|ci)/\w+/\w+\.py|ci/\w+\.py", text)
        if not (ROOT / file).exists()
    ]
