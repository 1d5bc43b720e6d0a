"""Forged checkpoints with valid sha256 digests."""

import hashlib
import json
from pathlib import Path
from typing import Any

__all__ = ["forge", "sign"]


def forge(folder: Path, content: dict[str, Any], *, signed: bool = True) -> None:
    """Write ``metadata.json``; with ``signed``, add the digest of the content."""
    if signed:
        content = {key: value for key, value in content.items() if key != "sha256"}
        plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
        content["sha256"] = hashlib.sha256(plain.encode()).hexdigest()
    (folder / "metadata.json").write_text(json.dumps(content))


def sign(folder: Path) -> None:
    """Update the sizes and digests in ``metadata.json`` to those of the files in the folder."""
    content = json.loads((folder / "metadata.json").read_bytes())
    for name, entry in content["files"].items():
        entry["size"] = (folder / name).stat().st_size
        if entry["sha256"] is not None:
            entry["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    forge(folder, content)
