"""The table of docs/models.md matches the tested architectures."""

from pathlib import Path

from tests.huggingface.architectures import ARCHITECTURES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_page_lists_all_architectures():
    table = (
        PAGE.read_text()
        .partition("<!-- unseen_models: begin -->")[2]
        .partition("<!-- unseen_models: end -->")[0]
    )
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert {row[0].removeprefix("| "): row[1].strip("`") for row in rows} == {
        name: found.model for name, found in ARCHITECTURES.items()
    }
    allowed = {"", "yes", *(f"[{number}]" for number in range(1, 100))}
    assert {cell.strip(" |") for row in rows for cell in row[3:]} <= allowed
