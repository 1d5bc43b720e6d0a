"""Conversations with images: preparation, random access, and the data module.

The tokens are stored, with as many image tokens as the processor gives each image. The images stay
in their files, and are read and processed with each batch: pixels in float32 have 20 to 50 times
the bytes of a compressed image, and processing takes a few milliseconds in the loader's workers.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F

from lightning_ptdp.base.option_types import Size
from lightning_ptdp.data.chat_build import IMAGES_FILE, ChatConfig
from lightning_ptdp.data.chat_datamodule import ChatDataModule
from lightning_ptdp.data.chat_format import ChatFormat
from lightning_ptdp.data.chat_stream import ChatStream, TooLong
from lightning_ptdp.data.conversations import (
    Columns,
    Conversation,
    FaultyRow,
    Paths,
    Rows,
    chat_files,
    read_rows,
    texts_of,
)
from lightning_ptdp.data.data_error import StoreError
from lightning_ptdp.data.huggingface_tokenizer import TOKENIZER_FOLDER, HuggingFaceProcessor
from lightning_ptdp.data.manifest import SplitName
from lightning_ptdp.data.stream import IGNORE_INDEX, PADDING, Batch
from lightning_ptdp.data.token_store import LearnedTokens, mark_sample


class ImageChatFormat(ChatFormat):
    """Conversion of conversations with images.

    The chat template writes one place for each image. The processor's text for the image, with as
    many image tokens as the model computes features, then replaces the place::

        of the template   <user><image>What?<assistant>A cat.<end>
        with the images   <user><image><image><image><image>What?<assistant>A cat.<end>

    The arguments are those of ``ChatFormat``, with a ``HuggingFaceProcessor`` as tokenizer.
    """

    # They are positions in the text before images replace their places.
    reads_marks = False

    def _compared(self, conversation: Conversation, text: str) -> LearnedTokens:
        processor = self._processor.processor
        images = images_of(conversation)
        parts = text.split(processor.image_token)
        if len(parts) != len(images) + 1:
            raise FaultyRow(
                f"it has {len(images)} images, but the text of the chat template has "
                f"{len(parts) - 1} places for them. Use a template that writes every image, and "
                f"texts without {processor.image_token}"
            )
        spelled = ["", *self._processor.spelled([open_image(image) for image in images])]

        def expanded(prefix: str) -> str:
            pieces = prefix.split(processor.image_token)
            return "".join(new + piece for new, piece in zip(spelled, pieces, strict=False))

        answers = [
            (len(expanded(text[:start])), len(expanded(text[:stop])))
            for start, stop in self._answers(conversation, text)
        ]
        # As in the processor: a template that writes the first token has written all of them.
        bos = self._tokenizer.bos_token
        ids, learned = self._masked(
            expanded(text), answers, add_special_tokens=not (bos and text.startswith(bos))
        )
        return ids, learned & ~np.isin(ids, processor.image_token_ids)


@dataclass(frozen=True, kw_only=True)
class ImageChatConfig(ChatConfig):
    """Source, destination and options of a preparation of conversations with images.

    ``ImageChatDataModule`` documents the fields.
    """

    max_images: Size | None = None

    form = "image_chat"
    tokenizer_class = HuggingFaceProcessor
    format_class = ImageChatFormat
    checks_every_row = True
    about = "colors"

    def rows(self, path: Paths, split: str) -> Rows:
        """Yield the rows with absolute paths of images; without a path, those about colors."""
        if path is None:
            yield from _questions_about_colors()
            return
        for file in chat_files(path):
            folder = file if file.is_dir() else file.parent
            for row in read_rows(str(file), split=split):
                yield absolute(row, folder)

    def content(self, columns: Columns, row: Mapping[str, Any]) -> Conversation:
        """Return the messages of a row, each with a list of texts and images.

        Raises:
            FaultyRow: An answer has no text, a part is neither text nor image, an image does not
                exist, or there are too many.
        """
        conversation = [
            {**message, "content": _parts(message.get("content"), number)}
            for number, message in enumerate(super().content(columns, row), start=1)
        ]
        images = images_of(conversation)
        if self.max_images is not None and len(images) > self.max_images:
            raise FaultyRow(f"it has {len(images)} images, more than max_images={self.max_images}")
        for image in images:
            open_image(image, decode=False)
        return conversation

    def encode(self, form: ChatFormat, content: Any) -> tuple[Any, np.ndarray, list[Any]]:
        """Return the texts and names of images, the tokens with marks, and the images with sizes."""
        images = images_of(content)
        # Equal conversations are equal in any folder.
        texts = [[message["role"], texts_of(message["content"])] for message in content]
        names = [Path(image).name for image in images]
        tokens = mark_sample(*form.encode(content))
        return [texts, names], tokens, [[image, image_size(image)] for image in images]


def _parts(content: object, number: int) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts = content if isinstance(content, list) else []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "image" and (kind != "text" or not isinstance(part.get("text"), str)):
            raise FaultyRow(
                f"message {number} has a part of the type {kind!r}, but only text and images are "
                "learned. Use {'type': 'text', 'text': ...} and {'type': 'image', 'path': ...}"
            )
    return parts


def _questions_about_colors() -> Rows:
    """Yield questions about images of one color each, some without an image."""
    for color in product((0, 85, 170, 255), repeat=3):
        pixels = b"P6 16 16 255 " + bytes(color) * 256  # in the format PPM
        path = f"data:image/ppm;base64,{base64.b64encode(pixels).decode()}"
        names = "red {} green {} blue {}".format(*color)
        shown = [{"type": "image", "path": path}, {"type": "text", "text": "Which color?"}]
        asked = shown if any(color[1:]) else f"Which color is {names}?"
        yield {
            "messages": [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": names},
            ]
        }


class ImageChatStream(ChatStream):
    """Random access to the samples of one split.

    The arguments are those of ``ChatStream`` without packing.
    """

    form = "image_chat"
    remedies = "drop"

    def __init__(self, folder: str | Path, *, split: SplitName = "train", **options: Any) -> None:
        super().__init__(folder, split=split, **options)
        self._processor = HuggingFaceProcessor(Path(folder, TOKENIZER_FOLDER))
        self._images = json.loads(Path(folder, split, IMAGES_FILE).read_text("utf-8"))

    def __getitems__(self, visits: Sequence[int]) -> Any:
        """Return inputs, labels and positions, int32 (b, 3, s), and the image tensors."""
        samples = [
            [] if number == PADDING else self._sample(number) for number in self.numbers(visits)
        ]
        return super().__getitems__(visits), self._processor.features(samples)

    def as_batch(self, rows: Any) -> Batch:
        """Return ``input_ids``, ``labels`` and token types (b, s), and the image tensors.

        Without an image in the batch, there are no image tensors.
        """
        tokens, images = rows
        batch = super().as_batch(tokens)
        # A label belongs to the token before it.
        learned = F.pad(batch["labels"] != IGNORE_INDEX, (1, 0))[:, :-1]
        return {**batch, **self._processor.token_types(batch["input_ids"], learned), **images}

    def _sample(self, number: int) -> list[Any]:
        """Return the images of a sample, of PIL."""
        images = self._images[int(self._order[number])]
        for image, size in images:
            if image_size(image) != size:
                raise StoreError(
                    f"image {image} has changed or is gone since the preparation. Put it back, or "
                    "prepare the data again with overwrite"
                )
        return [open_image(image) for image, _ in images]


class ImageChatDataModule(ChatDataModule):
    """Conversations with images as batches for ``LitImageTextToText``.

    A batch is ``{"input_ids", "labels", "token_type_ids"}``, int64 of shape (batch,
    sequence_length), and with images ``pixel_values`` and the other image tensors of the model's
    processor. Labels are shifted by one, and -100 outside of answers. Conversations without an
    image may be anywhere in between.

    The tokens are prepared once. The images stay in their files, which every rank reads.

    Args:
        path: Data as for ``ChatDataModule``, with a column ``messages``. The content of a message
            is a text, or a list of ``{"type": "text", "text": ...}`` and ``{"type": "image",
            "path": ...}``. Paths are relative to the folder of the data file. Default: questions
            about small images of one color.
        max_images: Largest number of images in a conversation. Default: any number.
        too_long: Treatment of samples that are longer than the sequence: drop, or raise an error.
            Their number is logged.
        kwargs: Further arguments of ``ChatDataModule``. ``tokenizer_dir`` is the folder of the
            processor.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    config_class = ImageChatConfig
    stream_class = ImageChatStream

    def __init__(
        self,
        *,
        path: str | list[str] | None = None,
        max_images: int | None = None,
        too_long: TooLong = "error",
        **kwargs: Any,
    ) -> None:
        if too_long == "cut":
            raise ValueError("too_long='cut' would cut images. Use too_long='drop' or 'error'")
        self._max_images = max_images
        super().__init__(path=path, packing=False, too_long=too_long, **kwargs)

    @property
    def image_ids(self) -> list[int]:
        """Ids of the tokens that stand for images."""
        tokenizer: Any = self.prepare_config.given_tokenizer()
        return list(tokenizer.processor.image_token_ids)

    def _make_config(self, **options: Any) -> ChatConfig:
        return ImageChatConfig(max_images=self._max_images, **options)


# ---- Images, named by their files, or small ones as text (``data:image/...``) ------------------


_IMAGE_KEYS = ("path", "image", "url")
_INLINE = "data:image/"
_SHOWN = 200  # characters in a message


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
    named = next((value[key] for key in _IMAGE_KEYS if value.get(key)), None)
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
    return os.path.getsize(image) if os.path.isfile(image) else -1


def open_image(image: object, *, decode: bool = True) -> Any:
    """Return an image of PIL in RGB, upright. Without ``decode``, only check how it begins.

    Raises:
        FaultyRow: The image is missing or broken, or has no path.
    """
    from PIL import Image, ImageOps

    if not isinstance(image, str):
        raise FaultyRow("an image has no path. Use {'type': 'image', 'path': 'file.png'}")
    if image_size(image) < 0:
        raise FaultyRow(
            f"image {image[-_SHOWN:]} is not a file. Paths are relative to the data file"
        )
    source: Any = image
    try:
        if image.startswith(_INLINE):
            source = io.BytesIO(base64.b64decode(image.partition(",")[2]))
        with Image.open(source) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB") if decode else None
    except Exception as error:  # PIL's decoders raise many types
        raise FaultyRow(
            f"image {image[:_SHOWN]} is broken ({type(error).__name__}). Replace it"
        ) from error
