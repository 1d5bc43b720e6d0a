"""Data module for conversations with images, whose pixels are read from the images' files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_ptdp.data.chat_build import IMAGES_FILE, ChatConfig
from lightning_ptdp.data.chat_datamodule import ChatDataModule
from lightning_ptdp.data.chat_stream import ChatStream, TooLong
from lightning_ptdp.data.data_error import StoreError
from lightning_ptdp.data.huggingface_processor import HuggingFaceProcessor
from lightning_ptdp.data.huggingface_tokenizer import TOKENIZER_FOLDER
from lightning_ptdp.data.image_chat_build import ImageChatConfig
from lightning_ptdp.data.image_files import image_size
from lightning_ptdp.data.manifest import SplitName
from lightning_ptdp.data.stream import IGNORE_INDEX, PADDING


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
        samples = [[] if visit == PADDING else self._sample(visit) for visit in visits]
        return super().__getitems__(visits), self._processor.features(samples)

    def as_batch(self, rows: Any) -> dict[str, Tensor]:
        """Return ``input_ids``, ``labels`` and token types (b, s), and the image tensors.

        Without an image in the batch, there are no image tensors.
        """
        tokens, images = rows
        batch = super().as_batch(tokens)
        # A label belongs to the token before it.
        learned = F.pad(batch["labels"] != IGNORE_INDEX, (1, 0))[:, :-1]
        return {**batch, **self._processor.token_types(batch["input_ids"], learned), **images}

    def _sample(self, visit: int) -> list[str]:
        """Return the images of a sample."""
        images = self._images[int(self._order[visit % self._size])]
        for image, size in images:
            if image_size(image) != size:
                raise StoreError(
                    f"image {image} has changed or is gone since the preparation. Put it back, or "
                    "prepare the data again with overwrite"
                )
        return [image for image, _ in images]


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
        tokenizer: Any = self.prepare_config.tokenizer()
        return list(tokenizer.processor.image_token_ids)

    def _make_config(self, **options: Any) -> ChatConfig:
        return ImageChatConfig(max_images=self._max_images, **options)
