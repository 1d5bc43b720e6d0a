"""Every Python, shell and YAML block of the README and of docs/ runs."""

import random
import re
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
# A block that cannot run in a test needs a reason. Raise this limit to allow another one.
MOST_NOT_RUN = 7
# A block takes three seconds, and ten times as long on a busy machine.
BLOCK_LIMIT_S = 40


@pytest.fixture(scope="module")
def unused():
    """Yield a fresh worker: blocks fork, and threads of earlier tests do not survive a fork."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Return a folder for all pages, with a text to train a tokenizer and a tiny model."""
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
def test_blocks_of_page_run(name, unused, shared, tmp_path):
    blocks = find_blocks(PAGES[name], name)
    unused.run(
        run_blocks,
        world_size=1,
        args=(blocks, str(tmp_path), str(shared)),
        limit=min(BLOCK_LIMIT_S * len(blocks), 280),
    )


def test_skipped_blocks_are_few_and_have_reasons():
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


def test_continuous_integration_installs_as_the_readme_says():
    blocks = [block.code for block in find_blocks(PAGES["README.md"], "README.md")]
    commands = [code.splitlines()[1].split(" && ") for code in blocks if "pip install" in code]
    script = (ROOT / "ci" / "install.sh").read_text(encoding="utf-8").replace(" --quiet", "")
    assert commands == [
        ["pip install uv", "uv pip install ."],
        [line for line in script.splitlines() if "pip install" in line],
    ]
    assert f"\n{' && '.join(commands[0])}\n" in PAGES["docs/quickstart.md"].read_text("utf-8")


def test_index_links_every_page():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages <= set(re.findall(r"\]\(([\w-]+\.md)", index))


def test_named_benchmarks_exist():
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
