"""Weights of a Hugging Face folder, for a wrapped Hugging Face model or a native model.

Each rank reads its own part directly from the folder, without converting it to a checkpoint first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch
from torch import nn

from lightning_ptdp.base.errors import listed
from lightning_ptdp.checkpoint import (
    CheckpointError,
    LocalRectangle,
    TensorEntry,
    rectangles_of,
)
from lightning_ptdp.checkpoint.local_rectangles import Tensors, check_cover
from lightning_ptdp.checkpoint.remote_path import PathLike
from lightning_ptdp.checkpoint.stored_tensor import StoredTensor, read_stored
from lightning_ptdp.exchange.model_folder import list_huggingface
from lightning_ptdp.exchange.tensor_views import View, views_in_files
from lightning_ptdp.shims.peft import plain_name
from lightning_ptdp.shims.transformers import ignored_names, modern_name

_SHOWN = 8
Parts = Sequence[tuple[StoredTensor, View]]
"""The stored tensors that make up a tensor, each with its part of it."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceNames:
    """Mapping from the names in a folder to the names in a module.

    Attributes:
        prefix: Attribute of the model in the module, with a dot; the prefix of all its names.
        base: Attribute of the model without its head ("transformer"), if this model has a head.
        own_base: The same attribute, if this model has no head. A folder stores its names without
            the attribute, or with it if the folder's model has a head.
        aliases: Name of a tied tensor -> the name of the tensor that it is tied to.
        wrapped: Name of a tensor in the model -> its current names, inside an adapter's wrapper.
        known: Names of the tensors of the module that this rank holds.
        ignored: Regular expressions of names to leave out, unless they are in ``known``.
        views: Name in the files -> the corresponding part of a model's tensor, if the name or the
            shape differs.
    """

    prefix: str = ""
    base: str = ""
    own_base: str = ""
    aliases: Mapping[str, str]
    wrapped: Mapping[str, Sequence[str]] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()
    views: Mapping[str, View] = field(default_factory=dict)

    def of(self, stored: Mapping[str, StoredTensor]) -> dict[str, Parts]:
        """Return the tensors in ``stored`` by name in the module, with their positions there.

        A tied tensor occurs once.
        """
        # Files of LLaVA have names of their own, also without this attribute.
        renamed = self.views.keys() & stored.keys()
        lacks_base = self.base and not renamed and not _any_begins(stored, f"{self.base}.")
        added = f"{self.base}." if lacks_base else ""
        removed = f"{self.own_base}."
        if not self.own_base or not _any_begins(stored, removed):
            removed = ""
        parts: dict[str, list[tuple[StoredTensor, View]]] = {}
        for file_name, value in stored.items():
            name = (added + modern_name(file_name)).removeprefix(removed)
            shape = value.entry.shape
            view = self.views.get(name, View.full(name, shape))
            if view.shape != shape:
                # A full view keeps the stored shape, which the later comparison of shapes rejects.
                view = View.full(view.name, shape)
            for current_name in self.wrapped.get(view.name, (view.name,)):
                full_name = self.prefix + current_name
                if full_name in self.known or not any(
                    re.search(pattern, full_name) for pattern in self.ignored
                ):
                    parts.setdefault(full_name, []).append((value, view))
        for name, tied in self._copies_of_tied().items():
            if name not in parts and tied in parts:
                parts[name] = parts[tied]
        # A tensor's own entry replaces that of its alias.
        aliases_first = sorted(parts, key=lambda name: name not in self.aliases)
        return {self.aliases.get(name, name): parts[name] for name in aliases_first}

    def _copies_of_tied(self) -> dict[str, str]:
        """Return the trained copies of tied tensors, each with the name that has its values.

        A folder need not have the name that such a copy replaces.
        """
        return {
            self.prefix + copy: self.aliases[self.prefix + name]
            for names in self.wrapped.values()
            for name in names
            if self.prefix + name in self.aliases
            for copy in names
            if self.prefix + copy not in self.aliases
        }


def _any_begins(names: Iterable[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


@dataclass(frozen=True)
class HuggingFaceWeights:
    """Tensors of a folder, by their names in a module; any rectangle can be read."""

    stored: Mapping[str, Parts]

    @classmethod
    def open(cls, path: PathLike, names: HuggingFaceNames) -> HuggingFaceWeights:
        """Open the folder ``path`` with the names of a module that wraps the model.

        Each name has the prefix ``model/``.

        Raises:
            CheckpointError: Files are missing or damaged.
        """
        weights = cls(
            {
                f"model/{name}": parts
                for name, parts in names.of(list_huggingface(Path(path))).items()
            }
        )
        for name, entry in weights.tensors.items():
            check_cover(
                name.removeprefix("model/"),
                entry.shape,
                [view.place for _, view in weights.stored[name]],
                "to load",
            )
        return weights

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the tensors in the module."""
        return frozenset(name.removeprefix("model/") for name in self.stored)

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Return the entries of the stored tensors by name."""
        entries: dict[str, TensorEntry] = {}
        for name, parts in self.stored.items():
            shape = tuple(map(max, zip(*(view.place.end for _, view in parts), strict=False)))
            entries[name] = TensorEntry(shape=shape, dtype=parts[0][0].entry.dtype)
        return entries

    def fill(self, tensors: Tensors) -> None:
        """Read this process's rectangles, converted to the dtype of their targets."""
        read_stored(part for target in rectangles_of(tensors) for part in self._parts(target))

    def rectangles(self) -> Iterator[LocalRectangle]:
        """Yield all stored tensors as parts of the module's, which are read when they are needed."""
        entries = self.tensors
        for name, parts in self.stored.items():
            for stored, view in parts:
                dtype = stored.entry.dtype
                yield LocalRectangle(
                    name=name,
                    full_shape=entries[name].shape,
                    offset=view.place.begin,
                    values=torch.empty(view.place.shape, dtype=dtype, device="meta"),
                    read=partial(self._read, name, dtype),
                )

    def _read(
        self, name: str, dtype: torch.dtype, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:
        values = torch.empty(shape, dtype=dtype)
        target = LocalRectangle(name=name, full_shape=shape, offset=offset, values=values)
        read_stored(self._parts(target))
        return values

    def _parts(self, target: LocalRectangle) -> Iterator[tuple[StoredTensor, LocalRectangle]]:
        """Yield the stored tensors of a rectangle, each with the destination of its values."""
        for stored, view in self.stored[target.name]:
            common = view.place.common(target.place)
            if common.numel:
                overlap = target.within(common)
                offset = view.in_file(common).begin
                values = view.turned(overlap.values)
                yield (
                    stored,
                    replace(overlap, full_shape=stored.entry.shape, offset=offset, values=values),
                )

    def check(self, model: nn.Module, *, may_lack: Sequence[str] = ()) -> None:
        """Compare names and shapes with those of the whole ``model``.

        Args:
            model: The whole model, which may be on the meta device.
            may_lack: Patterns of the model's names that need not be stored.

        Raises:
            CheckpointError: The names or shapes differ. The message lists the differences.
        """
        stored = {name.removeprefix("model/"): entry.shape for name, entry in self.tensors.items()}
        first: dict[int, str] = {}
        expected = {
            name: tuple(value.shape)
            for name, value in model.state_dict(keep_vars=True).items()
            if first.setdefault(id(value), name) == name
        }
        missing = [
            name
            for name in expected
            if name not in stored and not any(fnmatchcase(name, pattern) for pattern in may_lack)
        ]
        unexpected = [name for name in stored if name not in expected]
        mismatches = [
            f"{name!r} has the shape {stored[name]} in the folder, but {shape} in the model"
            for name, shape in expected.items()
            if stored.get(name, shape) != shape
        ]
        problems = []
        if missing:
            problems.append(f"the folder has no {listed([*map(repr, missing)], _SHOWN)}")
        if unexpected:
            problems.append(f"the model has no {listed([*map(repr, unexpected)], _SHOWN)}")
        if mismatches:
            problems.append(listed(mismatches, _SHOWN))
        if problems:
            raise CheckpointError("the weights do not fit this model: " + "; ".join(problems))


def names_in(
    module: nn.Module,
    aliases: Mapping[str, str],
    *,
    ignored: Sequence[str] = (),
    names: Iterable[str] | None = None,
) -> HuggingFaceNames:
    """Return the names of the tensors of the one Hugging Face model in ``module``.

    Names that match an ``ignored`` expression are left out. If this rank holds only a part of the
    module, ``names`` are the names of all parameters.

    Raises:
        CheckpointError: The module holds no Hugging Face model, or several.
    """
    models = models_in(module)
    if len(models) != 1:
        raise CheckpointError(
            f"{type(module).__name__} has {len(models)} Hugging Face models, but the folder has "
            "the tensors of one. Map its names, as in InitFrom(path, strict=False, "
            "rename={'student.': ''})"
        )
    ((name, model),) = models.items()
    base = str(model.base_model_prefix)
    has_head = base in model._modules
    prefix = f"{name}." if name else ""
    all_names = (
        names
        if names is not None
        else (key for key, _ in module.named_parameters(remove_duplicate=False))
    )
    return HuggingFaceNames(
        prefix=prefix,
        base=base if has_head else "",
        own_base="" if has_head else base,
        aliases=aliases,
        wrapped=_wrapped(key.removeprefix(prefix) for key in all_names if key.startswith(prefix)),
        known=frozenset(module.state_dict()),
        ignored=(*ignored_names(model), *ignored),
        views=_views(model),
    )


def models_in(
    module: nn.Module,
    is_model: Callable[[nn.Module], bool] = lambda child: hasattr(type(child), "base_model_prefix"),
) -> dict[str, nn.Module]:
    """Return the outermost models in ``module`` by name, which are Hugging Face's by default."""
    models: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in models)
        if not inside and is_model(child):
            models[name] = child
    return models


def _views(model: nn.Module) -> dict[str, View]:
    """Return the tensors that the model's files name differently or store in parts.

    ``model`` may be a part of the whole model.
    """
    try:
        with torch.device("meta"):
            full_model = type(model)(model.config)
    except TypeError:
        # A user's own class may have a different constructor.
        return {}
    views = views_in_files(
        full_model, {name: tuple(value.shape) for name, value in full_model.state_dict().items()}
    )
    return {name: view for name, view in views.items() if view != View.full(name, view.shape)}


def _wrapped(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names that peft has moved: original name -> current names.

    A layer with an adapter contains the original layer. A module that is trained together with the
    adapters occurs twice.
    """
    by_original: dict[str, list[str]] = {}
    for name in names:
        if (original := plain_name(name)) != name:
            by_original.setdefault(original, []).append(name)
    return by_original
