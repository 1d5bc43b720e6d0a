"""Random access to conversations with images, whose pixels are read from the images' files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from lightning_ptdp.data.chat_build import IMAGES_FILE
from lightning_ptdp.data.chat_stream import ChatStream
from lightning_ptdp.data.data_error import StoreError
from lightning_ptdp.data.huggingface_processor import HuggingFaceProcessor
from lightning_ptdp.data.huggingface_tokenizer import TOKENIZER_FOLDER
from lightning_ptdp.data.image_files import image_size
from lightning_ptdp.data.manifest import Form, SplitName
from lightning_ptdp.data.stream import IGNORE_INDEX, PADDING

__all__ = ["ImageChatStream"]


class ImageChatStream(ChatStream):
    """Random access to the samples of one split.

    The arguments are those of ``ChatStream`` without packing.
    """

    form: ClassVar[Form] = "image_chat"
    remedies: ClassVar[str] = "drop"

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
