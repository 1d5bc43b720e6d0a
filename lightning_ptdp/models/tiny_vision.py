"""Small vision-language model with a processor, created locally for first trials and tests."""

from __future__ import annotations

import os

from lightning_ptdp.base.requirements import import_optional
from lightning_ptdp.models.tiny import TINY_SIZES, new_folder, tiny_tokenizer

__all__ = ["make_tiny_vision"]

_IMAGE = "<image>"
_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SIDE, _PATCH = 16, 8
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": _SIDE,
    "patch_size": _PATCH,
}


def make_tiny_vision(folder: str | os.PathLike[str], *, seed: int = 0) -> None:
    """Write a LLaVA of random weights with its processor and a chat template.

    The language model is that of ``make_tiny``. An image has 4 tokens.

    Args:
        folder: Folder to create; an existing one is left unchanged.
        seed: Seed of the weights.
    """
    transformers = import_optional("transformers")

    with new_folder(folder, seed) as part:
        tokenizer = tiny_tokenizer(TINY_SIZES["vocab_size"], _IMAGE)
        side = {"height": _SIDE, "width": _SIDE}
        transformers.LlavaProcessor(
            transformers.CLIPImageProcessor(size=side, crop_size=side),
            tokenizer,
            patch_size=_PATCH,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=_CHAT,
        ).save_pretrained(part)
        config = transformers.LlavaConfig(
            text_config={**TINY_SIZES, "pad_token_id": tokenizer.pad_token_id},
            vision_config={"model_type": "clip_vision_model", **_TOWER},
            image_token_index=tokenizer.convert_tokens_to_ids(_IMAGE),
            tie_word_embeddings=False,
        )
        transformers.LlavaForConditionalGeneration(config).save_pretrained(part)
