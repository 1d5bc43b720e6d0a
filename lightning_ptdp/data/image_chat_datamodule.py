"""Data module for conversations with images."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_ptdp.data.chat_build import ChatConfig
from lightning_ptdp.data.chat_datamodule import ChatDataModule
from lightning_ptdp.data.chat_stream import ChatStream, TooLong
from lightning_ptdp.data.image_chat_build import ImageChatConfig
from lightning_ptdp.data.image_chat_stream import ImageChatStream

__all__ = ["ImageChatDataModule"]


class ImageChatDataModule(ChatDataModule):
    """Conversations with images as batches for ``LitImageTextToText``.

    A batch is ``{"input_ids", "labels", "token_type_ids"}``, int64 of shape (batch,
    sequence_length), and with images ``pixel_values`` and the other image tensors of the model's
    processor. Labels are shifted by one, and -100 outside of answers. Conversations without an
    image may be anywhere in between.

    The tokens are prepared once. The images stay in their files, which every rank reads.

    Args:
        tokenizer_dir: Folder of the processor, usually that of the model.
        path: Data as for ``ChatDataModule``, with a column ``messages``. The content of a message
            is a text, or a list of ``{"type": "text", "text": ...}`` and ``{"type": "image",
            "path": ...}``. Paths are relative to the folder of the data file. Default: questions
            about small images of one color.
        max_images: Largest number of images in a conversation. Default: any number.
        too_long: Treatment of samples that are longer than the sequence: drop, or raise an error.
            Their number is logged.
        kwargs: Further arguments of ``ChatDataModule``.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    config_class: ClassVar[type[ChatConfig]] = ImageChatConfig
    stream_class: ClassVar[type[ChatStream]] = ImageChatStream

    def __init__(
        self,
        *,
        tokenizer_dir: str | None = None,
        path: str | list[str] | None = None,
        max_images: int | None = None,
        too_long: TooLong = "error",
        **kwargs: Any,
    ) -> None:
        if too_long == "cut":
            raise ValueError("too_long='cut' would cut images. Use too_long='drop' or 'error'")
        self._max_images = max_images
        super().__init__(
            tokenizer_dir=tokenizer_dir, path=path, packing=False, too_long=too_long, **kwargs
        )

    @property
    def image_ids(self) -> list[int]:
        """Ids of the tokens that stand for images."""
        tokenizer: Any = self.prepare_config.tokenizer()
        return list(tokenizer.processor.image_token_ids)

    def _make_config(self, **options: Any) -> ChatConfig:
        return ImageChatConfig(max_images=self._max_images, **options)
