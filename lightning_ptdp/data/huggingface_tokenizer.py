"""Hugging Face tokenizers behind the interface of ``Tokenizer``, and processors of images.

The tokenizer comes from a folder, such as a model's; its files are copied unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from lightning_ptdp.base.errors import one_line
from lightning_ptdp.base.nested import IMAGE_FIELDS, images_by_sample
from lightning_ptdp.base.requirements import RequirementError, import_optional
from lightning_ptdp.base.untrusted import (
    MOST_SETTINGS,
    check_values,
    parse_json,
    read_files,
    reason,
    small_files,
)
from lightning_ptdp.checkpoint.files import sha256
from lightning_ptdp.checkpoint.local_copies import SETTING_FILES, local_copy
from lightning_ptdp.data.data_error import TokenizerError, reading
from lightning_ptdp.data.tokenizer import MODEL_FILE, Tokenizer
from lightning_ptdp.shims.transformers import TOKENIZER_FILES

TOKENIZER_FOLDER = "tokenizer"
"""Subfolder of a prepared folder that holds the tokenizer."""
_READ = (
    "*.json",
    "*.txt",
    "*.jinja",
    "*.spm",
    "*.codes",
    "*.tiktoken",
    "additional_chat_templates/*",
)
"""Further files that transformers may read."""
_MOST_VALUES = 1 << 22  # twice the number in the largest vocabularies with their merges
_SETTINGS = "tokenizer_config.json"


class HuggingFaceTokenizer:
    """Conversion between text and ids with a tokenizer of ``transformers``.

    transformers is imported when the first text is encoded.

    Args:
        folder: Folder with the files that a tokenizer's ``save_pretrained`` writes, such as a
            model's.

    Attributes:
        files: Contents of the tokenizer's files, by name.
        fingerprint: Hash of the files.

    Raises:
        TokenizerError: The folder holds no tokenizer, or its files are damaged.
    """

    patterns: ClassVar[tuple[str, ...]] = TOKENIZER_FILES
    """Names of the files that determine the ids, and are copied."""
    auto_class: ClassVar[str] = "AutoTokenizer"

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise TokenizerError(f"tokenizer folder {folder} does not exist")
        if not (self.folder / _SETTINGS).is_file():
            raise TokenizerError(
                f"{folder} has no tokenizer: neither a {_SETTINGS} of Hugging Face, as "
                "save_pretrained writes it, nor one of ptdp prepare. Give the folder of a "
                "tokenizer (tokenizer_dir; of ptdp generate: --tokenizer)"
            )
        with reading(
            f"tokenizer folder {folder}", TokenizerError, "Replace them with files of a tokenizer"
        ):
            self.files = read_files(self.folder, (*self.patterns, "config.json"))
            small_files(self.folder, _READ)
            parse_json(self.files[_SETTINGS], most_values=MOST_SETTINGS)
            for name, content in self.files.items():
                if name.endswith(".json"):
                    check_values(content, _MOST_VALUES)
        hashes = [
            f"{name} {sha256(content)}\n"
            for name, content in sorted(self.files.items())
            if name != "config.json"
        ]
        self.fingerprint = sha256("".join(hashes).encode())

    @cached_property
    def of_transformers(self) -> Any:
        """The tokenizer object of transformers.

        Raises:
            TokenizerError: transformers cannot read the files.
        """
        return self._load()

    @property
    def chat_template(self) -> object:
        """The chat template; None if there is none."""
        return self.of_transformers.chat_template

    def _load(self) -> Any:
        try:
            transformers = import_optional("transformers")
            return getattr(transformers, self.auto_class).from_pretrained(
                str(self.folder), local_files_only=True, trust_remote_code=False
            )
        except RequirementError:
            raise
        except Exception as error:  # transformers, tokenizers and json raise many types
            if "trust_remote_code" in str(error):
                raise TokenizerError(
                    f"tokenizer folder {self.folder} refers to its own code (auto_map), which "
                    "is not run. Use a model whose tokenizer is part of transformers"
                ) from error
            raise TokenizerError(
                f"tokenizer folder {self.folder} cannot be read: {one_line(reason(error))}"
            ) from error

    def save(self, folder: str | Path) -> None:
        """Copy the files into ``folder/tokenizer``."""
        target = Path(folder, TOKENIZER_FOLDER)
        target.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (target / name).write_bytes(content)

    @cached_property
    def vocabulary_size(self) -> int:
        """Largest id plus 1."""
        return max(self.of_transformers.get_vocab().values()) + 1

    @cached_property
    def eos_id(self) -> int:
        """Id that ends every document.

        Raises:
            TokenizerError: The tokenizer has no such id.
        """
        index = self.of_transformers.eos_token_id
        if index is None:
            raise TokenizerError(
                f"the tokenizer of {self.folder} has no eos_token to end documents with. Set "
                f"it in {_SETTINGS}"
            )
        return int(index)

    def control_id(self, symbol: str) -> int:
        """Refuse: a Hugging Face tokenizer has no control symbols of ours.

        Raises:
            TokenizerError: Always.
        """
        raise TokenizerError(
            f"the tokenizer of {self.folder} is from Hugging Face and has no control symbol "
            f"{symbol!r}. Let ptdp prepare learn one"
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without begin or end token."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str], *, num_threads: int = 1) -> list[list[int]]:
        """Return the ids of each text; the library chooses its number of threads."""
        return self.of_transformers(list(texts), add_special_tokens=False, verbose=False)[
            "input_ids"
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; special ids produce no text."""
        return str(self.of_transformers.decode(list(ids), skip_special_tokens=True))

    def __reduce__(self) -> tuple[type[HuggingFaceTokenizer], tuple[Path]]:
        return type(self), (self.folder,)


class CopiedTokenizer(HuggingFaceTokenizer):
    """Tokenizer of a prepared folder, which holds copied files only."""

    patterns = ("*",)


AnyTokenizer: TypeAlias = Tokenizer | HuggingFaceTokenizer


def load_tokenizer(folder: str | Path) -> AnyTokenizer:
    """Load the tokenizer of a prepared folder or of a Hugging Face folder.

    Raises:
        TokenizerError: A file is missing or damaged; the message names it.
    """
    folder = local_copy(folder, SETTING_FILES)
    if Path(folder, TOKENIZER_FOLDER).is_dir():
        return CopiedTokenizer(Path(folder, TOKENIZER_FOLDER))
    is_ours = Path(folder, MODEL_FILE).exists() and not Path(folder, _SETTINGS).is_file()
    return Tokenizer.load(folder) if is_ours else HuggingFaceTokenizer(folder)


# ---- Processors of vision-language models: tokenizer, image processor and chat template ----------


_PROCESSOR_SETTINGS = "processor_config.json"


class HuggingFaceProcessor(HuggingFaceTokenizer):
    """Processor in a folder that ``save_pretrained`` wrote, usually that of the model."""

    patterns = (*HuggingFaceTokenizer.patterns, f"*{_PROCESSOR_SETTINGS}")
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
                f"Give the folder of a vision-language model with its {_PROCESSOR_SETTINGS}"
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

    def spelled(self, images: Sequence[Any]) -> list[str]:
        """Return the text that the processor writes in the place of each image.

        Its length depends on the image, which is therefore processed.
        """
        if not images:
            return []
        output = self.processor(
            text=[self.processor.image_token * len(images)],
            images=[images],
            return_text_replacement_offsets=True,
        )
        return [place["replacement"] for place in output["text_replacement_offsets"][0]]

    def features(self, samples: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        """Return the tensors of a batch's images of PIL, by sample; empty without images.

        A model that has the samples along dimension 0 gets zeros for samples without images.
        """
        shown = [index for index, images in enumerate(samples) if images]
        if not shown:
            return {}
        images = [samples[index] for index in shown]
        output = self.processor(images=images, return_tensors="pt", padding=True)
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
