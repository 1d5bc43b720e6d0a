"""Code blocks of a Markdown page, run in order in one process.

A comment before a block, invisible to readers, changes how the test runs it::

    <!-- test: not run: REASON -->         the block is not run; only its syntax is checked
    <!-- test: raises ValueError -->       the block must raise this error
    <!-- test: exit 2 -->                  the last command of the block must exit with this code
    <!-- test: Trainer(devices=2) -->      calls of this name get these additional arguments
    <!-- test: with --trainer.max_steps 2 -->  ptdp gets these options where it uses a recipe
    <!-- test: in one process -->          ptdp runs without the layout of the recipe

The blocks of a page share a folder. Python blocks also share their names, which include ``Trainer``
and ``PTDPStrategy`` from the start. A block with a title (``title="train.py"``) is first written to
that file. Recipes are shrunk (``tiny_options``). ``RUN`` in a path is the id of the newest run."""

import contextlib
import io
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["NOT_RUN", "Block", "find_blocks", "run_blocks"]

NOT_RUN = "not run: "
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?P<rest>[^`]*)$")
_ORDER = re.compile(r"^ *<!-- test: (?P<order>.+?) -->$")
_LANGUAGES = ("python", "bash", "yaml")
_DEGREES = ("tensor_parallel_size", "pipeline_parallel_size", "virtual_pipeline_size")
_ONE_PROCESS = ["--trainer.devices=1", *(f"--trainer.strategy.{degree}=1" for degree in _DEGREES)]
_USES_A_RECIPE = ("fit", "validate", "test", "predict", "prepare", "bench", "verify")


class BlockFailure(AssertionError):
    """Failure of a block of a page."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Fenced block: its place, its content and how the test runs it."""

    place: str
    language: str
    title: str | None
    code: str
    orders: tuple[str, ...]

    @property
    def not_run(self) -> str | None:
        """Return the reason why the block is not run, or None."""
        return next(
            (order.removeprefix(NOT_RUN) for order in self.orders if order.startswith(NOT_RUN)),
            None,
        )

    def value(self, word: str) -> str | None:
        """Return the argument of the first order that starts with ``word``, or None."""
        return next(
            (
                order.removeprefix(f"{word} ")
                for order in self.orders
                if order.startswith(f"{word} ")
            ),
            None,
        )


def find_blocks(page: Path, name: str) -> list[Block]:
    """Return the Python, shell and YAML blocks of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    blocks: list[Block] = []
    orders: list[str] = []
    number = 0
    while number < len(lines):
        fence, order = _FENCE.match(lines[number]), _ORDER.match(lines[number])
        if order:
            orders.append(order["order"])
        elif fence:
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
            code = (
                "\n".join(line.removeprefix(fence["indent"]) for line in lines[number + 1 : end])
                + "\n"
            )
            title = re.search(r'title="([^"]+)"', fence["rest"])
            assert fence["language"], (
                f"{name}:{number + 1}: a block needs a language ('text' for output)"
            )
            assert fence["language"] not in ("py", "sh", "shell", "console"), (
                f"{name}:{number + 1}: write python or bash"
            )
            if fence["language"] in _LANGUAGES:
                place = f"{name}:{number + 1}"
                blocks.append(
                    Block(
                        place=place,
                        language=fence["language"],
                        title=title and title[1],
                        code=code,
                        orders=tuple(orders),
                    )
                )
            orders, number = [], end
        elif lines[number].strip():
            assert not orders, (
                f"{name}:{number + 1}: a test comment must be directly before its block"
            )
        number += 1
    return blocks


def run_blocks(rank: int, blocks: list[Block], folder: str, shared: str) -> None:
    """Run the blocks of a page in ``folder``; for ``Pool.run``.

    Args:
        rank: Rank of the worker.
        blocks: Blocks in the order of the page.
        folder: Empty folder of the page.
        shared: Folder of all pages: the text in ``text``, prepared data and the MLflow store.
    """
    # imported once, before blocks fork ranks
    import litdata  # noqa: F401
    import mlflow.store.tracking.sqlalchemy_workspace_store  # noqa: F401
    import peft  # noqa: F401
    import s3fs  # noqa: F401
    import sqlalchemy.dialects.sqlite  # noqa: F401

    before = os.getcwd()
    os.chdir(folder)
    Path(shared, "runs").mkdir(exist_ok=True)
    Path("runs").symlink_to(Path(shared, "runs"), target_is_directory=True)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("from lightning.pytorch import Trainer\nfrom lightning_ptdp import PTDPStrategy", names)
    try:
        for block in blocks:
            if block.title is not None:
                Path(block.title).write_text(block.code, encoding="utf-8")
            if block.not_run is not None:
                _check_syntax(block)
                continue
            said = io.StringIO()
            try:
                with contextlib.redirect_stdout(said):
                    _run(block, names, Path(shared))
            except Exception as error:
                raise BlockFailure(
                    f"{block.place}: {type(error).__name__}: {error}\n{said.getvalue()[-2000:]}"
                ) from error
    finally:
        os.chdir(before)


def _run(block: Block, names: dict[str, Any], shared: Path) -> None:
    if block.language == "python":
        _run_python(block, names)
    elif block.language == "bash":
        _run_shell(block, shared)
    else:
        yaml.safe_load(block.code)


def _run_python(block: Block, names: dict[str, Any]) -> None:
    code = block.code
    for name, arguments in (
        m.groups() for order in block.orders if (m := re.fullmatch(r"(\w+)\((.+)\)", order))
    ):
        code, count = re.subn(
            rf"\b{name}\((?=(\))?)", lambda m, a=arguments: f"{m[0]}{a}{'' if m[1] else ', '}", code
        )
        assert count, f"there is no call of {name}"
    wanted = block.value("raises")
    try:
        exec(compile(code, block.place, "exec"), names)
    except Exception as error:
        if wanted is None or wanted not in {kind.__name__ for kind in type(error).__mro__}:
            raise
    else:
        assert wanted is None, f"did not raise {wanted}"


def _run_shell(block: Block, shared: Path) -> None:
    commands = [
        words
        for line in block.code.replace("\\\n", " ").splitlines()
        if (words := shlex.split(line, comments=True))
    ]
    added = shlex.split(block.value("with") or "") + (
        _ONE_PROCESS if "in one process" in block.orders else []
    )
    wanted = int(block.value("exit") or 0)
    for number, words in enumerate(commands):
        words = [_of_this_run(word) for word in words]
        if words[0] != "ptdp":
            code = subprocess.run(words, check=False).returncode
        elif words[1] in _USES_A_RECIPE:
            code = _run_ptdp(words[1:] + added, shared)
        else:
            code = _run_ptdp(words[1:], shared)
        expected = wanted if number == len(commands) - 1 else 0
        assert code == expected, f"{shlex.join(words)} exited with {code}"


def _run_ptdp(arguments: list[str], shared: Path) -> int:
    from lightning_ptdp.cli import main

    return main(arguments + tiny_options(arguments, shared))


def tiny_options(arguments: list[str], shared: Path) -> list[str]:
    """Return options that shrink a recipe to a tiny model on a tiny text.

    The list is empty for commands without a recipe and for a page's own configuration, which is
    tiny already."""
    if arguments[0] not in _USES_A_RECIPE or "--config" not in arguments or "--help" in arguments:
        return []
    recipe = arguments[arguments.index("--config") + 1]
    if Path(recipe).is_file():
        recipe = yaml.safe_load(Path(recipe).read_text(encoding="utf-8")).get("base")
    if recipe is None:  # the page's own file, which is tiny already
        return []
    sizes = {"vocabulary_size": 320, "sequence_length": 32}
    options: dict[str, Any] = {
        f"model.config.{name}": value for name, value in (sizes | {"hidden_size": 32}).items()
    }
    options |= {f"data.{name}": value for name, value in sizes.items()}
    options |= {
        "data.source": str(shared / "text"),
        "data.data_dir": str(shared / f"data-{recipe.partition('/')[0]}"),
    }
    if recipe.startswith("hf/"):  # the model is tiny already, and its tokenizer is given
        options = {}
    if recipe.startswith("gpt/") and arguments[0] == "fit":
        options["sample.max_new_tokens"] = 4
    options |= {
        "data.micro_batch_size": 2,
        "data.validation_samples": 8,
        "model.optimizer.warmup_steps": 0,
        "trainer.max_steps": 2,
        "trainer.val_check_interval": 2,
        "trainer.enable_progress_bar": "false",
    }
    return [f"--{name}={value}" for name, value in options.items()]


def _of_this_run(word: str) -> str:
    """Replace ``RUN`` in a path by the id of the newest run."""
    if "/RUN/" not in word:
        return word
    found = sorted(Path().glob(word.replace("/RUN/", "/*/")), key=lambda path: path.stat().st_mtime)
    assert found, f"there is no {word}"
    return str(found[-1])


def _check_syntax(block: Block) -> None:
    if block.language == "python":
        compile(block.code, block.place, "exec")
    elif block.language == "bash":
        done = subprocess.run(
            ["bash", "-n"], input=block.code, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, f"{block.place}: {done.stderr}"
