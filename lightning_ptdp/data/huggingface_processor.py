"""Processors of vision-language models, and the images that they read.

A processor is a tokenizer, an image processor and a chat template. Conversations name images by
their files, or contain small ones as text (``data:image/...``).
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.base.nested import IMAGE_FIELDS, images_by_sample
from lightning_ptdp.data.conversations import Conversation, FaultyRow
from lightning_ptdp.data.data_error import TokenizerError
from lightning_ptdp.data.huggingface_tokenizer import HuggingFaceTokenizer

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


_SETTINGS = "processor_config.json"


class HuggingFaceProcessor(HuggingFaceTokenizer):
    """Processor in a folder that ``save_pretrained`` wrote, usually that of the model."""

    patterns = (*HuggingFaceTokenizer.patterns, f"*{_SETTINGS}")
    auto_class = "AutoProcessor"

    @cached_property
    def processor(self) -> Any:
        """The processor of transformers.

        Raises:
            TokenizerError: transformers cannot read the files, or they have no image processor.
        """
        processor = self._load()
        if not hasattr(processor, "image_token"):
            raise TokenizerError(
                f"{self.folder} has no processor for images, only a {type(processor).__name__}. "
                f"Give the folder of a vision-language model with its {_SETTINGS}"
            )
        return processor

    @cached_property
    def of_transformers(self) -> Any:
        """The tokenizer of the processor."""
        return self.processor.tokenizer

    @property
    def chat_template(self) -> object:
        """The processor's chat template; None if there is none."""
        return self.processor.chat_template

    def spelled(self, images: Sequence[str]) -> list[str]:
        """Return the text that the processor writes in the place of each image.

        Its length depends on the image, which is therefore processed.
        """
        if not images:
            return []
        output = self.processor(
            text=[self.processor.image_token * len(images)],
            images=[[open_image(image) for image in images]],
            return_text_replacement_offsets=True,
        )
        return [place["replacement"] for place in output["text_replacement_offsets"][0]]

    def features(self, samples: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        """Return the image tensors of a batch; empty without images.

        A model that has the samples along dimension 0 gets zeros for samples without images.
        """
        shown = [index for index, images in enumerate(samples) if images]
        if not shown:
            return {}
        opened = [[open_image(image) for image in samples[index]] for index in shown]
        output = self.processor(images=opened, return_tensors="pt", padding=True)
        tensors = {name: output[name] for name in IMAGE_FIELDS if name in output}
        if not images_by_sample(tensors):
            return tensors
        return {
            name: value.new_zeros(len(samples), *value.shape[1:]).index_copy(
                0, torch.tensor(shown), value
            )
            for name, value in tensors.items()
        }

    def token_types(self, ids: Tensor, learned: Tensor) -> dict[str, Tensor]:
        """Return the tensors (b, s) with which some models build their attention masks.

        They are 1 for the tokens of images (Gemma 3, Qwen2.5-VL), or from the first answer on
        (PaliGemma).

        Args:
            ids: ``input_ids`` (b, s).
            learned: Mask (b, s) of the tokens in answers.
        """
        if not self.processor.return_mm_token_type_ids:
            return {"token_type_ids": learned.cumsum(1).clamp(max=1)}
        shown = torch.isin(ids, torch.tensor(self.processor.image_token_ids)).long()
        return {"token_type_ids": shown, "mm_token_type_ids": shown}
