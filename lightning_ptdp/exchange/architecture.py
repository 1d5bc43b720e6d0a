"""Correspondence of an exported folder with the models of transformers.

Names and shapes are checked before the export, and logits after it.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_ptdp.base.checked_json import Json
from lightning_ptdp.base.errors import listed
from lightning_ptdp.base.requirements import import_optional
from lightning_ptdp.checkpoint import CheckpointError, TensorReader, read_full
from lightning_ptdp.exchange.model_folder import read_config
from lightning_ptdp.exchange.name_tables import Model
from lightning_ptdp.parameters.rectangle import Rectangle
from lightning_ptdp.shims.transformers import as_in_files

_SHOWN = 3
_LENGTH = 16
_CLOSE = 1e-4
"""Tolerance of logits, relative to the largest one.

Two implementations of a model add float32 numbers in different orders.
"""


def check_architecture(
    description: Mapping[str, Json],
    stored: Mapping[str, tuple[int, ...]],
    source: str,
    kind: Any = None,
    *,
    in_files: bool = False,
) -> Any:
    """Compare the tensors to export with the architecture that their configuration names.

    The architecture is built on the meta device.

    Args:
        description: Content of ``config.json``.
        stored: Name -> shape of every tensor.
        source: Origin of the tensors, for messages.
        kind: The model's class, if it is known.
        in_files: True if the names are those of files, which differ for some tensors from
            transformers' names in a model.

    Returns:
        The architecture.

    Raises:
        CheckpointError: transformers does not have the architecture or is not installed; a name is
            missing or unknown; or a shape differs.
    """
    name, kind = _architecture(description) if kind is None else (kind.__name__, kind)
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file, torch.device("meta"):
            # JSON in a file may hold infinities.
            file.write(json.dumps(description))
            file.flush()
            model = kind(kind.config_class.from_json_file(file.name))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{name} cannot be built from the configuration: {error}") from error
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    first: dict[int, str] = {}
    tied = {
        key: first.setdefault(id(value), key)
        for key, value in model.named_parameters(remove_duplicate=False)
    }
    if in_files:
        untied = {key: shape for key, shape in expected.items() if tied.get(key, key) == key}
        expected = {key: view.shape for key, view in views_in_files(model, untied).items()}
    present = {tied.get(key, key) for key in stored}
    missing = sorted(
        key for key in expected if key not in stored and tied.get(key, key) not in present
    )
    unknown = sorted(stored.keys() - expected.keys())
    if missing or unknown:
        parts = [f"lacks {_listed(missing)}"] * bool(missing) + [
            f"has the unknown {_listed(unknown)}"
        ] * bool(unknown)
        raise CheckpointError(
            f"{source} does not fit {name}: it {' and '.join(parts)}. Nothing was written. "
            "First merge adapters into the weights, or name the configuration and the prefix "
            "of the trained model"
        )
    for key, shape in stored.items():
        if expected[key] != shape:
            raise CheckpointError(
                f"{source} does not fit {name}: {key!r} has the shape {shape}, but "
                f"must have {expected[key]} according to the configuration"
            )
    return model


def verify_huggingface(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    prefix: str,
    model: Model | None,
) -> str:
    """Load an exported folder as its users do, and compare it with the checkpoint.

    The comparison needs memory for two whole models.

    Args:
        source: The checkpoint folder.
        folder: The exported folder.
        prefix: Prefix of the model's names in the checkpoint, with a dot.
        model: The native model, whose logits are compared. None: the module wraps a Hugging Face
            model, and every tensor is compared.

    Returns:
        The result, in words.

    Raises:
        CheckpointError: The folder and the checkpoint differ.
    """
    name, kind = _architecture(read_config(Path(folder)))
    hf_model, info = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    problems = {
        key: sorted(map(str, info.get(key, ())))
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    if any(problems.values()):
        message = "; ".join(f"{key} {_listed(names)}" for key, names in problems.items() if names)
        raise CheckpointError(f"{folder}: {name}.from_pretrained finds {message}")
    if model is None:
        state = hf_model.state_dict()
        reader = TensorReader(source)
        for stored in sorted(reader.metadata.names("model/")):
            key = stored.removeprefix(f"model/{prefix}")
            if key in state and not torch.equal(
                state[key], reader.read(stored).to(state[key].dtype)
            ):
                raise CheckpointError(f"{folder}: {key!r} differs from {source}")
        return f"{name}.from_pretrained loads it, every tensor equal"
    weights = {
        key.removeprefix(prefix): value
        for key, value in read_full(source).items()
        if key.startswith(prefix)
    }
    native = model.family.build(model.config)
    native.load_state_dict(weights)
    ids = (
        torch.arange(min(_LENGTH, model.config.sequence_length))[None]
        * 7
        % model.config.vocabulary_size
    )
    with torch.no_grad():
        logits = native.to(hf_model.dtype).float().eval()(ids)
        output = hf_model.float().eval()(ids)
    # BERT returns the logits of two heads.
    hf_logits = output["logits"] if "logits" in output else output["prediction_logits"]
    logits = logits[0] if isinstance(logits, tuple) else logits
    gap = float((logits - hf_logits).abs().max() / logits.abs().max())
    if not gap < _CLOSE:
        raise CheckpointError(
            f"{folder}: the logits of {name} differ from those of {source} by {gap:.1e} of the "
            "largest"
        )
    return f"the logits of {name} are equal, to {gap:.0e} of the largest"


def _architecture(description: Mapping[str, Json]) -> tuple[str, Any]:
    transformers = import_optional("transformers")
    names = description.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    kind = getattr(transformers, name, None) if name else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise CheckpointError(
            f"the configuration's architectures={names!r} are unknown to transformers "
            f"{transformers.__version__}"
        )
    return name, kind


def _listed(names: list[str]) -> str:
    return listed([repr(name) for name in names], _SHOWN)


# ---- Correspondence of tensor names in transformers' files with those in its models --------------
#
# transformers renames some tensors, and stores experts separately that its models compute together.


@dataclass(frozen=True, kw_only=True)
class View:
    """A tensor of a file, as a part of a tensor of the model.

    Attributes:
        name: Name of the model's tensor.
        place: Rectangle of the part in the model's tensor.
        dims: For each dimension of the file's tensor, the corresponding dimension of the model's.
            The model's remaining dimensions have an extent of 1 in the part.
    """

    name: str
    place: Rectangle
    dims: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> View:
        """Return the view of a whole tensor."""
        return cls(
            name=name, place=Rectangle.at((0,) * len(shape), shape), dims=tuple(range(len(shape)))
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the file's tensor."""
        return tuple(self.place.shape[dim] for dim in self.dims)

    def in_file(self, place: Rectangle) -> Rectangle:
        """Return the position in the file's tensor of the rectangle ``place`` of the model's."""
        begin, end = (
            tuple(ends[dim] for dim in self.dims) for ends in place.seen_from(self.place.begin)
        )
        return Rectangle(begin, end)

    def turned(self, values: torch.Tensor) -> torch.Tensor:
        """Return a view of ``values`` of the model's tensor in the file's order of dimensions."""
        unit_dims = [dim for dim in range(values.dim()) if dim not in self.dims]
        return values.permute(*unit_dims, *self.dims)[(0,) * len(unit_dims)]


def views_in_files(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, View]:
    """Return the tensors that ``save_pretrained`` writes, as parts of the model's tensors.

    The result is keyed by the names in the files. If one tensor is not a rectangle of a model's
    tensor, all tensors keep their names and shapes in the model, which ``from_pretrained`` reads as
    well.

    Args:
        model: A model of transformers, on the meta device.
        shapes: Shapes of its tensors by name. Tied tensors occur once.
    """
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    model_names = {name if tied.get(name, name) in shapes else tied[name]: name for name in shapes}
    names = [*model_names.values()]
    begins = list[int]()
    end = 0
    for name in names:
        begins.append(end)
        end += max(math.prod(shapes[name]), 1)
    # All tensors are views of one flat tensor, so that the storage offset of a view identifies the
    # tensor that it is a part of.
    flat = torch.empty(end, device="meta")
    tensors = {
        stored: flat[begin : begin + math.prod(shapes[name])].view(shapes[name])
        for (stored, name), begin in zip(model_names.items(), begins, strict=True)
    }
    views: dict[str, View] = {}
    for stored, value in as_in_files(model, tensors).items():
        if value.untyped_storage().nbytes() != flat.untyped_storage().nbytes():
            views.clear()
            break
        first = int(value.storage_offset())
        index = bisect_right(begins, first) - 1
        view = _view(names[index], shapes[names[index]], first - begins[index], value)
        if view is None:
            views.clear()
            break
        views[stored] = view
    return views or {stored: View.whole(name, shapes[name]) for stored, name in model_names.items()}


def _view(name: str, shape: tuple[int, ...], first: int, value: torch.Tensor) -> View | None:
    """Return the view of a contiguous tensor that ``value`` is, or None if not a rectangle.

    Args:
        name: Name of the contiguous tensor.
        shape: Shape of the contiguous tensor.
        first: Number of elements by which ``value`` begins after the contiguous tensor.
        value: The view.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    begin = (
        tuple(first // stride % extent for stride, extent in zip(strides, shape, strict=True))
        if 0 not in shape
        else (0,) * len(shape)
    )
    dims: list[int] = []
    for extent, stride in zip(value.shape, value.stride(), strict=True):
        free = [dim for dim in range(len(shape)) if dim not in dims]
        matches = [
            dim
            for dim in free
            if (shape[dim] == 1 if extent == 1 else strides[dim] == stride and shape[dim] > 1)
        ]
        if not matches:
            return None
        dims.append(matches[0])
    extents = [1] * len(shape)
    for dim, extent in zip(dims, value.shape, strict=True):
        extents[dim] = extent
    return View(name=name, place=Rectangle.at(begin, extents), dims=tuple(dims))
