"""The weights of a Hugging Face folder for a module that wraps the model: each rank reads its own part, without a conversion before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lightning_ptdp.checkpoint import CheckpointError, TensorEntry, rectangles_of
from lightning_ptdp.checkpoint.local import Tensors
from lightning_ptdp.exchange.folder import open_huggingface

__all__ = ["HuggingFaceNames", "HuggingFaceWeights", "names_in"]


@dataclass(frozen=True, kw_only=True)
class HuggingFaceNames:
    """How the tensors of a folder are called in a module.

    Attributes:
        prefix: What stands before all names of the model: the attribute that it is, with a dot.
        base: The attribute of the model without its head ("transformer"), if this one has a head.
        own_base: The same attribute, if this is a model without a head: its names are stored without it, or with it beside a head's.
        aliases: Name of a tied tensor -> the name under which it is known.
    """

    prefix: str = ""
    base: str = ""
    own_base: str = ""
    aliases: Mapping[str, str]

    def of(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is ``stored``, by its names in the module; a tied tensor once."""
        if self.base and not any(name.startswith(f"{self.base}.") for name in stored):
            stored = {f"{self.base}.{name}": value for name, value in stored.items()}
        if self.own_base and any(name.startswith(f"{self.own_base}.") for name in stored):
            stored = {name.removeprefix(f"{self.own_base}."): value for name, value in stored.items()}
        named = {self.prefix + name: value for name, value in stored.items()}
        tied = {self.aliases[name]: value for name, value in named.items() if name in self.aliases}
        return {**tied, **{name: value for name, value in named.items() if name not in self.aliases}}


@dataclass(frozen=True)
class HuggingFaceWeights:
    """The mapped tensors of a folder, of which any rectangle can be read; names begin with ``model/``."""

    values: Mapping[str, torch.Tensor]

    @classmethod
    def open(cls, path: str | os.PathLike[str], names: HuggingFaceNames) -> HuggingFaceWeights:
        """Of the folder ``path``, by the names that they have in a module.

        Raises:
            CheckpointError: Files are missing or damaged.
        """
        return cls({f"model/{name}": value for name, value in names.of(open_huggingface(Path(path))).items()})

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """What there is, by name."""
        return {name: TensorEntry(shape=tuple(value.shape), dtype=value.dtype) for name, value in self.values.items()}

    def fill(self, tensors: Tensors) -> None:
        """Read this process's rectangles, converted to the dtype of their targets."""
        for rectangle in rectangles_of(tensors):
            rectangle.values.copy_(self.values[rectangle.name][rectangle.place.slices])


def names_in(module: nn.Module, aliases: Mapping[str, str]) -> HuggingFaceNames:
    """How the tensors of the one Hugging Face model in ``module`` are called.

    Raises:
        CheckpointError: There is none, or several.
    """
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        if hasattr(child, "base_model_prefix") and not any(f"{name}.".startswith(f"{outer}.") or not outer for outer in found):
            found[name] = child
    if len(found) != 1:
        raise CheckpointError(
            f"{type(module).__name__} holds {len(found)} Hugging Face models, and the folder has the tensors of one: say what its names "
            "are called there, InitFrom(path, strict=False, rename={'student.': ''})"
        )
    ((name, model),) = found.items()
    base = str(model.base_model_prefix)
    has_head = base in model._modules
    return HuggingFaceNames(
        prefix=f"{name}." if name else "", base=base if has_head else "", own_base="" if has_head else base, aliases=aliases
    )
