"""Size of the package in tokens of code, without comments, docstrings, newlines and indentation.

Prints the size of each part of ``lightning_ptdp``, largest first, and the total. The exit code is 1
if the total exceeds the limit in ``ci/size.txt``. A change that needs more tokens raises the limit
and gives the reason.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "lightning_ptdp"
LIMIT = Path(__file__).with_name("size.txt")
NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


def count_tokens(source: str) -> int:
    """Return the number of code tokens in the source of a file."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        # A docstring, or a string below an attribute that documents it.
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docstrings.add((node.lineno, node.col_offset))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in NOT_CODE and token.start not in docstrings for token in tokens)


def main() -> int:
    """Print the table, and compare the total with the limit."""
    sizes: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        sizes[part] += count_tokens(path.read_text(encoding="utf-8"))
    for part, size in sizes.most_common():
        print(f"{size:8,}  {part}")
    limit = int(LIMIT.read_text(encoding="utf-8"))
    print(f"{sizes.total():8,}  all (limit {limit:,})")
    return int(sizes.total() > limit)


if __name__ == "__main__":
    sys.exit(main())
