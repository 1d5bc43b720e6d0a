"""Rules for the structure of the package and its tests."""

import ast
import graphlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "lightning_ptdp"


def imported(file):
    """Return the subpackages that a file imports, at module level or later."""
    nodes = list(ast.walk(ast.parse(file.read_bytes())))
    names = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{name.name}" for name in node.names]
    return {name.split(".")[1] for name in names if name.startswith(f"{PACKAGE.name}.")}


def test_subpackages_have_no_import_cycle():
    rooms = {}
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        rooms.setdefault(room, set()).update(imported(file) - {room})
    # raises CycleError, which names the cycle
    tuple(graphlib.TopologicalSorter(rooms).static_order())


def test_module_names_are_unique():
    """Unique names avoid confusion. Commands of ``ptdp`` are exempt: each is a module."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name != "cli" and file.stem != "__init__":
            found.setdefault(file.stem, []).append(file.relative_to(PACKAGE))
    assert not [files for files in found.values() if len(files) > 1]


def test_class_names_are_unique():
    found = {}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    assert not {name: files for name, files in found.items() if len(files) > 1}


def test_top_level_has_few_modules():
    assert len(list(PACKAGE.glob("*.py"))) <= 8


@pytest.mark.parametrize("folder", [TESTS, TESTS.parent / "ci"], ids=lambda folder: folder.name)
def test_modules_with_tests_are_not_imported(folder):
    """An imported test would run twice, and imported fixtures are hard to find."""
    wrong = [
        f"{file.relative_to(TESTS.parent)} imports {node.module}"
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests.")
        if any(part.startswith("test_") for part in node.module.split("."))
    ]
    assert not wrong


def test_no_class_defines_wrapped():
    """``dataclass`` calls ``inspect.signature``, which follows ``__wrapped__`` on classes.

    This affects CPython before 3.11.7 and 3.12.1 (gh-112006).
    """
    wrong = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if not isinstance(node, ast.ClassDef):
                continue
            names = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
            names |= {
                name.id
                for child in node.body
                for name in ast.walk(child)
                if isinstance(name, ast.Name)
            }
            if "__wrapped__" in names:
                wrong.append(f"{file.relative_to(PACKAGE.parent)}: {node.name}")
    assert not wrong


def test_docstrings_do_not_begin_with_relative_clause():
    """Relative clauses ("What a rank holds") are hard to read, in attribute docstrings too."""
    relative = {"What", "Whether", "Who", "Whoever", "Of", "How", "Where", "That"}
    wrong = []
    for folder in (PACKAGE, TESTS, TESTS.parent / "ci", TESTS.parent / "recipes"):
        for file in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                match node:
                    case ast.Expr(value=ast.Constant(value=str(text))) if (
                        text.split() and text.split()[0] in relative
                    ):
                        wrong.append(
                            f"{file.relative_to(TESTS.parent)}:{node.lineno}: "
                            f"{text.splitlines()[0]}"
                        )
    assert wrong == []
