"""The weights of a Hugging Face folder for a module that wraps the model, or for our own: each rank reads its own part, without a
conversion before."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from lightning_ptdp.checkpoint import CheckpointError, LocalRectangle, TensorEntry, rectangles_of
from lightning_ptdp.checkpoint.local import Tensors
from lightning_ptdp.exchange.folder import open_huggingface
from lightning_ptdp.exchange.huggingface import our_rectangles

__all__ = ["HuggingFaceNames", "HuggingFaceWeights", "models_in", "names_in", "weights_opener"]


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
    """The mapped tensors of a folder, of which any rectangle can be read: for each of a module's, whose names begin with ``model/``, the
    rectangles that it is made of."""

    parts: Mapping[str, Sequence[LocalRectangle]]

    @classmethod
    def open(cls, path: str | os.PathLike[str], names: HuggingFaceNames) -> HuggingFaceWeights:
        """Of the folder ``path``, by the names that they have in a module that wraps the model.

        Raises:
            CheckpointError: Files are missing or damaged.
        """
        values = names.of(open_huggingface(Path(path)))
        return cls({f"model/{name}": [LocalRectangle.whole(f"model/{name}", value)] for name, value in values.items()})

    @classmethod
    def open_as_ours(cls, path: str | os.PathLike[str]) -> HuggingFaceWeights:
        """Of the folder ``path``, by the names that they have in our own model of that kind.

        Raises:
            CheckpointError: As of ``from_huggingface``.
        """
        parts: dict[str, list[LocalRectangle]] = {}
        for one in our_rectangles(Path(path), "model/model.")[1]:
            parts.setdefault(one.name, []).append(one)
        return cls(parts)

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """What there is, by name."""
        return {name: TensorEntry(shape=parts[0].full_shape, dtype=parts[0].values.dtype) for name, parts in self.parts.items()}

    def fill(self, tensors: Tensors) -> None:
        """Read this process's rectangles, converted to the dtype of their targets."""
        for wanted in rectangles_of(tensors):
            for stored in self.parts[wanted.name]:
                common = stored.place.common(wanted.place)
                if common.numel:
                    values = stored.values[common.seen_from(stored.offset).slices]
                    wanted.values[common.seen_from(wanted.offset).slices].copy_(values)


def weights_opener(module: nn.Module, aliases: Mapping[str, str]) -> Callable[[str | os.PathLike[str]], HuggingFaceWeights]:
    """What reads a Hugging Face folder for ``module``, which wraps such a model or is one of ours.

    Raises:
        CheckpointError: It holds several of theirs.
    """
    if any(hasattr(child, "base_model_prefix") for child in module.modules()):
        return partial(HuggingFaceWeights.open, names=names_in(module, aliases))
    return HuggingFaceWeights.open_as_ours


def names_in(module: nn.Module, aliases: Mapping[str, str]) -> HuggingFaceNames:
    """How the tensors of the one Hugging Face model in ``module`` are called.

    Raises:
        CheckpointError: There is none, or several.
    """
    found = models_in(module)
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


def models_in(module: nn.Module) -> dict[str, nn.Module]:
    """The Hugging Face models in ``module`` by their names there, without those that are parts of others."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        if hasattr(child, "base_model_prefix") and not any(f"{name}.".startswith(f"{outer}.") or not outer for outer in found):
            found[name] = child
    return found
