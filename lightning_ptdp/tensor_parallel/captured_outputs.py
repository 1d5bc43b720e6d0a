"""Checks of the outputs that a Hugging Face model records, if a rank has only a part."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from torch import nn

__all__ = ["check_captured", "refuse_captured_parts"]

_BY_HEAD = ("attentions", "cross_attentions")
_BY_SEQUENCE = ("hidden_states", "router_logits", *_BY_HEAD)


def refuse_captured_parts(
    model: nn.Module, divided: Collection[str], *, sequence_parallel: bool
) -> None:
    """Make Hugging Face models raise a ValueError if a recorded output is only a part.

    A rank has the attention weights of its own heads only. Under sequence parallelism it has only
    its slice of every output with a sequence dimension. Applies to every Hugging Face model inside
    ``model`` that contains one of the ``divided`` modules. A vision tower usually has none.
    """
    for module in _recording(model, divided):
        module.register_forward_hook(partial(_check, sequence_parallel))


def check_captured(model: nn.Module, divided: Collection[str], *, sequence_parallel: bool) -> None:
    """Check the outputs requested in the configurations of the same Hugging Face models.

    Raises:
        ValueError: A rank would have only a part of a requested output.
    """
    for module in _recording(model, divided):
        _refuse_parts(getattr(module, "config", None), "output_", sequence_parallel)


def _recording(model: nn.Module, divided: Collection[str]) -> Iterator[nn.Module]:
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if hasattr(module, "_can_record_outputs") and any(
            inner.startswith(prefix) for inner in divided
        ):
            yield module


def _check(sequence_parallel: bool, _module: nn.Module, _args: object, output: object) -> None:
    _refuse_parts(output, "", sequence_parallel)


def _refuse_parts(source: object, prefix: str, sequence_parallel: bool) -> None:
    for kind in _BY_SEQUENCE if sequence_parallel else _BY_HEAD:
        if getattr(source, prefix + kind, None):
            field = (
                "sequence_parallel=True"
                if sequence_parallel and kind not in _BY_HEAD
                else "tensor_parallel_size > 1"
            )
            part = "slice of the sequence" if kind not in _BY_HEAD else "share of the heads"
            raise ValueError(
                f"output_{kind}=True cannot be combined with {field}, because a rank has the "
                f"{kind} of its {part} only. Use only one of them"
            )
