"""The files of a tokenizer, and how a model generates, that go along with an export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

__all__ = ["files_beside", "tokenizer_folder", "tokenizer_of"]

_FILES = (
    "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.model",
    "preprocessor_config.json", "processor_config.json", "generation_config.json",
)  # fmt: skip
"""What ``save_pretrained`` writes beside a model's configuration and weights;"""
_SETTINGS = {
    # transformers' class of sentencepiece models with byte pieces; ours adds nothing to a text.
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": False,
    "add_eos_token": False,
    "add_prefix_space": False,
    "legacy": False,
    "clean_up_tokenization_spaces": False,
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
}


def files_beside(config: Path) -> dict[str, bytes]:
    """By name, the files of a tokenizer and of generation in the folder of a ``config.json``."""
    folder = config if config.is_dir() else config.parent
    found = {file for name in _FILES for file in folder.glob(name) if file.is_file()}
    return {file.name: file.read_bytes() for file in sorted(found)}


def tokenizer_of(state: Mapping[str, object]) -> dict[str, bytes]:
    """By name, files from which transformers reads the tokenizer that a language model of ours was trained with; nothing where its
    folder is not there any more.

    It gives the same ids, but for the character U+2581, which it takes for a space.

    Args:
        state: Of the checkpoint.
    """
    folder = tokenizer_folder(state)
    if folder is None or not Path(folder).is_dir():
        return {}
    from lightning_ptdp.data.errors import TokenizerError
    from lightning_ptdp.data.huggingface_tokenizer import HuggingFaceTokenizer, load_tokenizer

    try:
        tokenizer = load_tokenizer(folder)
    except TokenizerError:
        return {}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.files
    model = tokenizer.model
    settings = json.dumps(_SETTINGS, indent=2)
    return {"tokenizer.model": model, "tokenizer_config.json": f"{settings}\n".encode()}


def tokenizer_folder(state: Mapping[str, object]) -> str | None:
    """The prepared folder that a checkpoint's data module names."""
    given = state.get("datamodule_hyper_parameters")
    if not isinstance(given, Mapping):
        return None
    folder = given["corpora"][0]["data_dir"] if given.get("corpora") else given.get("data_dir")
    return None if folder is None else str(folder)
