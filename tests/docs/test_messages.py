"""Messages of the troubleshooting page exist in the code."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
PLACEHOLDER = "\0"
_ROW = re.compile(r"^\| `(?P<message>.+?)` \|", re.MULTILINE)


def messages():
    """Return the first cells of the page's tables."""
    return _ROW.findall(PAGE.read_text(encoding="utf-8"))


def strings(tree):
    """Yield every string of a module, with placeholders for inserted values and sums joined."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp):
            text = whole(node)
            if text:
                yield text


def whole(node):
    """Return the text of a string expression, or None for other expressions."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(whole(value) or PLACEHOLDER for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (whole(left) or PLACEHOLDER) + (whole(right) or PLACEHOLDER)
    return None


@pytest.fixture(scope="module")
def known():
    files = (ROOT / "lightning_ptdp").rglob("*.py")
    return [
        text
        for file in sorted(files)
        for text in strings(ast.parse(file.read_text(encoding="utf-8")))
    ]


def test_page_lists_unique_messages():
    assert len(messages()) > 60
    assert len(set(messages())) == len(messages())


def holds(text, pieces):
    """Return True if ``text`` contains all ``pieces`` in order."""
    at = 0
    for piece in pieces:
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


@pytest.mark.parametrize("message", messages())
def test_documented_message_exists_in_code(message, known):
    pieces = message.split("…")
    assert any(holds(text, pieces) for text in known), (
        f"no string of the package contains {message!r}"
    )
