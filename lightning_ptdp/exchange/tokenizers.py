"""Files that an export contains besides the model: tokenizer and generation settings."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_ptdp.base.checked_json import Json
from lightning_ptdp.base.data_record import WORKING_FOLDER
from lightning_ptdp.base.untrusted import read_bytes, read_files
from lightning_ptdp.checkpoint import reading
from lightning_ptdp.checkpoint.remote_path import is_url
from lightning_ptdp.shims.transformers import TOKENIZER_FILES

if TYPE_CHECKING:  # imported lazily
    from lightning_ptdp.data import Tokenizer


_OTHERS = ("preprocessor_config.json", "processor_config.json", "generation_config.json")
"""Files that ``save_pretrained`` writes beside a model's configuration and weights."""
_TEMPLATE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"
_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
}
_SPACE = "\u2581"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def tokenizer_files(config: Path, state: Mapping[str, object] | None = None) -> dict[str, bytes]:
    """Return the files of the tokenizer and of generation beside a ``config.json``, by name.

    If ``state`` (of a checkpoint) names the tokenizer and the chat template of the data, these are
    returned instead.

    Raises:
        CheckpointError: A file is a pipe, is larger than a tokenizer's, or is a link to another
            folder.
    """
    folder = config if config.is_dir() else config.parent
    trained = tokenizer_of(state or {})
    copied = _OTHERS if _CONFIG in trained else (*_OTHERS, *TOKENIZER_FILES)
    with reading(folder):
        return read_files(folder, copied) | trained


def tokenizer_of(state: Mapping[str, object]) -> dict[str, bytes]:
    """Return files by name from which transformers reads the tokenizer of the training data.

    The chat template is the one of the training. Files that no longer exist are left out.

    transformers gives the same ids, except for the character U+2581, which it takes for a space,
    and for a text that spells a special piece. With a BERT tokenizer, a text becomes [CLS] text
    [SEP], and a pair becomes [CLS] text [SEP] text [SEP], as in training.

    Args:
        state: State of the checkpoint.
    """
    files = _trained_tokenizer(state)
    template = chat_template(state)
    if template is None:
        return files
    if not os.path.isfile(template):
        warnings.warn(
            f"the result lacks the chat template of the training, because the file {template} does "
            "not exist here",
            stacklevel=2,
        )
        return files
    with reading(Path(template)):
        return {**files, _TEMPLATE: read_bytes(template)}


def _trained_tokenizer(state: Mapping[str, object]) -> dict[str, bytes]:
    folder = tokenizer_folder(state)
    if folder is None:
        return {}
    if not Path(folder).is_dir():
        warnings.warn(
            f"the result has no tokenizer, because the folder of the training data, {folder}, does "
            "not exist here",
            stacklevel=2,
        )
        return {}
    from lightning_ptdp.data.data_error import TokenizerError
    from lightning_ptdp.data.huggingface_tokenizer import HuggingFaceTokenizer, load_tokenizer

    try:
        tokenizer = load_tokenizer(folder)
    except TokenizerError:
        return {}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return {name: content for name, content in tokenizer.files.items() if name != "config.json"}
    return converted_tokenizer(tokenizer)


def converted_tokenizer(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return files by name from which transformers reads a tokenizer of this package."""
    from lightning_ptdp.data.pairs import CLS, MASK, SEP

    document = _document(tokenizer)
    settings = dict[str, Json](_SETTINGS)
    inputs = ["input_ids", "attention_mask"]
    if CLS in tokenizer.pieces:
        document["post_processor"] = _template(
            {piece: tokenizer.control_id(piece) for piece in (CLS, SEP)}, CLS, SEP
        )
        settings |= {"cls_token": CLS, "sep_token": SEP, "mask_token": MASK}
        inputs.insert(1, "token_type_ids")
    settings["model_input_names"] = inputs
    documents = {"tokenizer.json": document, _CONFIG: settings}
    encoded = {
        name: f"{json.dumps(content, indent=2)}\n".encode() for name, content in documents.items()
    }
    # Some readers need sentencepiece's file.
    return encoded | {"tokenizer.model": tokenizer.model}


def _document(tokenizer: Tokenizer) -> dict[str, Json]:
    """Return the tokenizer in the format of the tokenizers package.

    Sentencepiece gives lower ids to pieces that it merges earlier.
    """
    ids = {piece: index for index, piece in enumerate(tokenizer.pieces)}
    merges = [
        [piece[:cut], piece[cut:]]
        for piece, index in ids.items()
        if tokenizer.is_text(index) and not _BYTE.fullmatch(piece)
        for cut in sorted(
            range(1, len(piece)), key=lambda cut: (ids.get(piece[:cut], 0), ids.get(piece[cut:], 0))
        )
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added_pieces = {
        piece: index
        for piece, index in ids.items()
        if piece == "\n" or not tokenizer.is_text(index)
    }
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": piece, "special": piece != "\n", **flags}
            for piece, index in added_pieces.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": _SPACE,
            "prepend_scheme": "never",
            "split": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": merges,
        },
    }


def _template(ids: Mapping[str, int], begin: str, end: str) -> dict[str, Json]:
    """Return a template with special pieces around a text, and between the texts of a pair."""

    def part(kind: str, name: str, segment: int = 0) -> Json:
        return {kind: {"id": name, "type_id": segment}}

    single = [part("SpecialToken", begin), part("Sequence", "A"), part("SpecialToken", end)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, part("Sequence", "B", 1), part("SpecialToken", end, 1)],
        "special_tokens": {
            piece: {"id": piece, "ids": [index], "tokens": [piece]} for piece, index in ids.items()
        },
    }


def tokenizer_folder(state: Mapping[str, object]) -> str | None:
    """Return the prepared folder that a checkpoint's data module names, if it does."""
    options = state.get("datamodule_hyper_parameters")
    corpora = options.get("corpora") if isinstance(options, Mapping) else None
    if isinstance(corpora, Sequence) and corpora:
        options = corpora[0]
    folder = options.get("data_dir") if isinstance(options, Mapping) else None
    return trained_path(state, folder) if isinstance(folder, str | Path) else None


def chat_template(state: Mapping[str, object]) -> str | None:
    """Return the file with the chat template that a checkpoint's data module names, if it does."""
    options = state.get("datamodule_hyper_parameters")
    template = options.get("chat_template") if isinstance(options, Mapping) else None
    return trained_path(state, template) if isinstance(template, str | Path) else None


def trained_path(state: Mapping[str, object], path: str | Path) -> str:
    """Return a path that a checkpoint names.

    A relative path is relative to the working directory of the training. If it does not exist
    there, it is relative to the current one.
    """
    name = str(path)
    states = (value for value in state.values() if isinstance(value, Mapping))
    origin = next((str(one[WORKING_FOLDER]) for one in states if WORKING_FOLDER in one), None)
    if origin is None or is_url(name) or not os.path.exists(Path(origin, name)):
        return name
    return str(Path(origin, name))
