"""Names and values as MLflow takes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass

__all__ = ["allowed_name", "flat_parameters"]

_VALUE_LIMIT = 500


def allowed_name(name: str) -> str:
    """``name`` in the characters that MLflow takes."""
    return re.sub(r"[^\w./: -]+", "_", name)


def flat_parameters(params: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested mappings, dataclasses and namespaces as dotted keys that MLflow accepts, with values that fit; nothing that is None, or that
    Lightning keeps for itself (``_instantiator``)."""
    if is_dataclass(params) and not isinstance(params, type):
        params = asdict(params)
    for key, value in (params if isinstance(params, Mapping) else vars(params)).items():
        if value is None or str(key).startswith("_"):
            continue
        name = allowed_name(f"{prefix}{key}")
        if (isinstance(value, Mapping) and value) or (is_dataclass(value) and not isinstance(value, type)):
            yield from flat_parameters(value, f"{name}.")
        else:
            text = str(value)
            yield name, text if len(text) <= _VALUE_LIMIT else text[: _VALUE_LIMIT - 1] + "…"
