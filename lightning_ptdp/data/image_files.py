"""Images that conversations name: files, and small ones inside the text (``data:image/...``)."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_ptdp.data.conversations import Conversation, FaultyRow

_KEYS = ("path", "image", "url")
_INLINE = "data:image/"


def absolute(value: Any, folder: Path) -> Any:
    """Return a row in which every image has the form ``{"type": "image", "path": ...}``.

    A path that is relative to ``folder`` becomes absolute.
    """
    if isinstance(value, list):
        return [absolute(item, folder) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.get("type") != "image":
        # Tables store None for a key that other parts have.
        return {k: absolute(item, folder) for k, item in value.items() if item is not None}
    named = next((value[key] for key in _KEYS if value.get(key)), None)
    if isinstance(named, str) and not named.startswith(_INLINE):
        named = str((folder / named).absolute())
    return {"type": "image", "path": named}


def images_of(conversation: Conversation) -> list[str]:
    """Return the images of a conversation in their order."""
    parts = (part for message in conversation for part in message["content"])
    return [part["path"] for part in parts if part["type"] == "image"]


def image_size(image: str) -> int:
    """Return the bytes of an image; -1 if its file is missing."""
    if image.startswith(_INLINE):
        return len(image)
    return Path(image).stat().st_size if Path(image).is_file() else -1


def open_image(image: object, *, decode: bool = True) -> Any:
    """Return an image of PIL in RGB, upright. Without ``decode``, only check how it begins.

    Raises:
        FaultyRow: The image is missing or broken, or has no path.
    """
    from PIL import Image, ImageOps

    if not isinstance(image, str):
        raise FaultyRow("an image has no path. Use {'type': 'image', 'path': 'file.png'}")
    source: Any = image
    if image.startswith(_INLINE):
        source = io.BytesIO(base64.b64decode(image.partition(",")[2]))
    elif not Path(image).is_file():
        raise FaultyRow(f"image {image} is not a file. Paths are relative to the data file")
    try:
        with Image.open(source) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB") if decode else None
    except Exception as error:  # PIL's decoders raise many types
        raise FaultyRow(
            f"image {image[:200]} is broken ({type(error).__name__}). Replace it"
        ) from error
