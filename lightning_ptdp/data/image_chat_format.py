"""Conversion of a conversation with images to token ids and a mask of its answers.

The chat template writes one place for each image. The processor's text for the image, with as many
image tokens as the model computes features, then replaces the place::

    of the template   <user><image>What?<assistant>A cat.<end>
    with the images   <user><image><image><image><image>What?<assistant>A cat.<end>
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from lightning_ptdp.data.chat_format import ChatFormat
from lightning_ptdp.data.conversations import Conversation, FaultyRow
from lightning_ptdp.data.image_files import images_of

__all__ = ["ImageChatFormat"]


class ImageChatFormat(ChatFormat):
    """Conversion of conversations with images.

    The arguments are those of ``ChatFormat``, with a ``HuggingFaceProcessor`` as tokenizer.
    """

    # They are positions in the text before images replace their places.
    reads_marks: ClassVar[bool] = False

    def _compared(self, conversation: Conversation, text: str) -> tuple[np.ndarray, np.ndarray]:
        processor, images = self._processor.processor, images_of(conversation)
        parts = text.split(processor.image_token)
        if len(parts) != len(images) + 1:
            raise FaultyRow(
                f"it has {len(images)} images, but the text of the chat template has "
                f"{len(parts) - 1} places for them. Use a template that writes every image, and "
                f"texts without {processor.image_token}"
            )
        spelled = ["", *self._processor.spelled(images)]

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
