"""How the tests themselves are built."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.parametrize("folder", [TESTS, TESTS.parent / "ci"], ids=lambda folder: folder.name)
def test_what_several_tests_use_stands_in_a_module_without_tests(folder: Path) -> None:
    """A test that is imported runs twice, or its fixtures are found where nobody looks for them."""
    wrong = [
        f"{file.relative_to(TESTS.parent)} imports {node.module}"
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests.")
        if any(part.startswith("test_") for part in node.module.split("."))
    ]
    assert not wrong
