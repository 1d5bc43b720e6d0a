"""The page of stable names against the packages."""

import importlib
import re
from pathlib import Path

import lightning_ptdp
from lightning_ptdp.checkpoint.metadata import FORMAT_VERSION

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "stability.md").read_text(encoding="utf-8")
ROWS = {
    package: set(re.findall(r"`(\w+)`", names))
    for package, names in re.findall(r"^\| `(lightning_ptdp[\w.]*)` \| (.*) \|$", PAGE, re.M)
}


def test_stable_names_are_public():
    assert len(ROWS) > 10
    for package, names in ROWS.items():
        missing = names - {*importlib.import_module(package).__all__}
        assert not missing, f"{package} lacks {sorted(missing)}"


def test_names_of_package_and_callbacks_are_stable():
    """Users write these; a new one is listed, or is private."""
    assert ROWS["lightning_ptdp"] == {*lightning_ptdp.__all__}
    callbacks = {*importlib.import_module("lightning_ptdp.callbacks").__all__}
    assert callbacks - ROWS["lightning_ptdp.callbacks"] == {"RunRecord"}


def test_page_names_version_of_checkpoints():
    assert f"format version {FORMAT_VERSION}" in PAGE
