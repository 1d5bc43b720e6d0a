"""Tokenizers for generation: conversion between text and the token ids of a model.

The tokenizer is that of the model's training data, ours or Hugging Face's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from lightning_ptdp.base.time_limit import time_limit
from lightning_ptdp.base.untrusted import hub_blobs, read_json
from lightning_ptdp.data import Tokenizer
from lightning_ptdp.data.chat_format import LIMIT_S, read_template
from lightning_ptdp.data.huggingface_tokenizer import HuggingFaceTokenizer, load_tokenizer
from lightning_ptdp.exchange.tokenizers import (
    chat_template,
    converted_tokenizer,
    tokenizer_folder,
    trained_path,
)
from lightning_ptdp.models.pretrained_folder import local_folder

Message: TypeAlias = Mapping[str, str]
"""``{"role": "user", "content": "…"}``."""


class TextTokenizer(Protocol):
    """Conversion between text and ids.

    Attributes:
        eos_ids: Ids that end a text.
        of_transformers: The tokenizer object of transformers, as an export contains it.
    """

    eos_ids: frozenset[int]

    @property
    def of_transformers(self) -> Any: ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text to continue; at least one.

        Raises:
            ValueError: The text is empty, and the tokenizer has no token that could begin it.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation, up to the beginning of the answer.

        Raises:
            ValueError: The tokenizer has no chat template, or its template rejects these messages.
        """


def find_tokenizer(state: Mapping[str, Any], folder: str | None = None) -> TextTokenizer:
    """Load the tokenizer in ``folder``, or the one that the state of a checkpoint names.

    The state names the tokenizer of the data or of the Hugging Face model.

    Raises:
        ValueError: There is no tokenizer.
    """
    if folder is not None:
        return _load(folder)
    data_hparams = state.get("datamodule_hyper_parameters") or {}
    template = chat_template(state)
    data = tokenizer_folder(state)
    model = (state.get("hyper_parameters") or {}).get("path")
    if data is not None and Path(data).is_dir():
        # The tokenizer of the training data takes precedence, but a folder of conversations may
        # have none.
        try:
            return _load(data, template)
        except ValueError:
            if not isinstance(model, str):
                raise
    if isinstance(model, str):
        given = data_hparams.get("tokenizer_dir")
        return _load(local_folder(trained_path(state, given) if given else model), template)
    if data is not None:
        raise ValueError(
            f"the folder of the training data, {data}, does not exist here. Give that of the "
            "tokenizer (--tokenizer)"
        )
    raise ValueError(
        "the tokenizer is unknown. Give its folder, as ptdp prepare or save_pretrained wrote "
        "it (--tokenizer)"
    )


def _load(folder: str | Path, template: str | None = None) -> TextTokenizer:
    tokenizer = load_tokenizer(folder)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _HuggingFace(tokenizer, template)
    return _Own(tokenizer)


class _Own:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = frozenset([tokenizer.eos_id])

    @cached_property
    def of_transformers(self) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in converted_tokenizer(self._tokenizer).items():
                Path(folder, name).write_bytes(content)
            return HuggingFaceTokenizer(folder).of_transformers

    def encode(self, text: str) -> list[int]:
        # A document begins after the end token of the previous one.
        return self._tokenizer.encode(text) or [self._tokenizer.eos_id]

    def decode(self, ids: Sequence[int]) -> str:
        # A model may have more rows than there are pieces.
        return self._tokenizer.decode(
            [index for index in ids if index < self._tokenizer.vocabulary_size]
        )

    def chat(self, messages: Sequence[Message]) -> list[int]:
        raise ValueError(
            "the tokenizer of a pretraining corpus has no chat template. Use ptdp generate, "
            "which continues a text"
        )


class _HuggingFace:
    def __init__(self, tokenizer: HuggingFaceTokenizer, template: str | None) -> None:
        self._folder = tokenizer.folder
        self.of_transformers = tokenizer.of_transformers
        if template is not None:
            self.of_transformers.chat_template = read_template(template)
        eos_ids = [*_ends(self._folder), self.of_transformers.eos_token_id]
        self.eos_ids = frozenset(index for index in eos_ids if index is not None)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.of_transformers(text, verbose=False)["input_ids"]
        while len(ids) > 1 and ids[-1] in self.eos_ids:
            ids.pop()  # the tokenizer may end every text
        if not ids:
            candidates = [self.of_transformers.bos_token_id, *sorted(self.eos_ids)]
            ids = [index for index in candidates if index is not None][:1]
        if not ids:
            raise ValueError(
                f"the tokenizer in {self._folder} has no token that begins or ends a text. "
                "Give a prompt that is not empty"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.of_transformers.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        if not self.of_transformers.chat_template:
            raise ValueError(
                f"the tokenizer in {self._folder} has no chat template. Use ptdp generate, "
                "which continues a text"
            )
        try:
            with time_limit(LIMIT_S):
                text = self.of_transformers.apply_chat_template(
                    list(messages), add_generation_prompt=True, tokenize=False
                )
        except Exception as error:  # jinja errors of a template that refuses a role or an order
            raise ValueError(
                f"the chat template in {self._folder} does not support this conversation: {error}"
            ) from error
        return self.of_transformers(text, add_special_tokens=False, verbose=False)["input_ids"]


def _ends(folder: Path) -> list[int]:
    """Return the ids in the model's generation config that end a text.

    An instruction model often has more of them than the tokenizer.
    """
    file = folder / "generation_config.json"
    try:
        eos_ids = (
            read_json(file, linked=hub_blobs(folder)).get("eos_token_id")
            if file.is_file()
            else None
        )
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    return [
        index
        for index in (eos_ids if isinstance(eos_ids, list) else [eos_ids])
        if isinstance(index, int)
    ]
