"""Processors of vision-language models: a tokenizer, an image processor and a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.base.nested import IMAGE_FIELDS, images_by_sample
from lightning_ptdp.data.data_error import TokenizerError
from lightning_ptdp.data.huggingface_tokenizer import HuggingFaceTokenizer
from lightning_ptdp.data.image_files import open_image

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
