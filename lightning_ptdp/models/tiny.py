"""Small Hugging Face models with their tokenizers, created locally for first trials and tests."""

from __future__ import annotations

import os
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_ptdp.base.requirements import import_optional

TINY_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "vocab_size": 1024,
        "tie_word_embeddings": False,
    }
)
"""Default configuration of ``make_tiny``, as in the ``config.json`` that it writes."""

_SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' "
    "}}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_IMAGE = "<image>"
_VISION_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SIDE = 16
_PATCH = 8
_FILES = ("argparse.py", "ast.py", "inspect.py", "pathlib.py", "textwrap.py", "typing.py")


def make_tiny(
    folder: str | os.PathLike[str],
    *,
    vocabulary_size: int = TINY_SIZES["vocab_size"],
    seed: int = 0,
    **config: Any,
) -> None:
    """Write a Llama of random weights with a byte-level tokenizer and a chat template.

    The files are those of ``save_pretrained``.

    Args:
        folder: Folder to create; an existing one is left unchanged.
        vocabulary_size: Number of ids of the tokenizer, and of rows of the embedding. The tokenizer
            is learned from a few files of Python's standard library.
        seed: Seed of the weights.
        config: Fields of ``transformers.LlamaConfig``. Default: 4 layers of width 64 with 4 heads
            and 2 key/value heads, 256 positions.
    """
    transformers = import_optional("transformers")

    with _new_folder(folder, seed) as part:
        tokenizer = tiny_tokenizer(vocabulary_size)
        tokenizer.save_pretrained(part)
        sizes = {
            **TINY_SIZES,
            "vocab_size": vocabulary_size,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        del sizes["model_type"]
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **config}))
        # An answer ends at the end of its turn; without this id, generation continues with another
        # turn.
        model.generation_config.eos_token_id = [
            tokenizer.eos_token_id,
            tokenizer.convert_tokens_to_ids("<|im_end|>"),
        ]
        model.save_pretrained(part)


def make_tiny_vision(folder: str | os.PathLike[str], *, seed: int = 0) -> None:
    """Write a LLaVA of random weights with its processor and a chat template.

    The language model is that of ``make_tiny``. An image has 4 tokens.

    Args:
        folder: Folder to create; an existing one is left unchanged.
        seed: Seed of the weights.
    """
    transformers = import_optional("transformers")

    with _new_folder(folder, seed) as part:
        tokenizer = tiny_tokenizer(TINY_SIZES["vocab_size"], _IMAGE)
        side = {"height": _SIDE, "width": _SIDE}
        transformers.LlavaProcessor(
            transformers.CLIPImageProcessor(size=side, crop_size=side),
            tokenizer,
            patch_size=_PATCH,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=_VISION_CHAT,
        ).save_pretrained(part)
        config = transformers.LlavaConfig(
            text_config={**TINY_SIZES, "pad_token_id": tokenizer.pad_token_id},
            vision_config={
                "model_type": "clip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": _SIDE,
                "patch_size": _PATCH,
            },
            image_token_index=tokenizer.convert_tokens_to_ids(_IMAGE),
            tie_word_embeddings=False,
        )
        transformers.LlavaForConditionalGeneration(config).save_pretrained(part)


@contextmanager
def _new_folder(folder: str | os.PathLike[str], seed: int) -> Iterator[Path]:
    """Provide a path to write a model to, whose folder then appears complete or not at all.

    An existing folder is left unchanged. Random numbers follow ``seed``.
    """
    import torch

    target = Path(os.path.abspath(folder))
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(
            dir=target.parent, prefix=f".{target.name}-", ignore_cleanup_errors=True
        ) as scratch,
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
    ):
        torch.manual_seed(seed)
        part = Path(scratch, target.name)
        yield part
        if not target.exists():
            try:
                part.rename(target)
            except OSError:
                # Ranks create the same folder at the same time.
                if not target.exists():
                    raise


def tiny_tokenizer(vocabulary_size: int, *special: str) -> Any:
    """Return a byte-level tokenizer, with further special tokens, learned from Python's library."""
    import tokenizers

    transformers = import_optional("transformers")

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[*_SPECIAL, *special],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=_CHAT,
        model_max_length=256,
    )


def _text() -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    return ((folder / name).read_text() for name in _FILES if (folder / name).is_file())
