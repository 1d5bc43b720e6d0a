"""Names of transformers that it does not promise to keep, in one place (tests/huggingface/test_collected.py)."""

from __future__ import annotations

import sys

from torch import nn

__all__ = ["captured_outputs", "install_capture", "is_capture"]

_CAPTURING = "transformers.utils.output_capturing"
_INSTALLED = "_output_capturing_hooks_installed"


def captured_outputs() -> dict[str, list[object]]:
    """What the forward of a Hugging Face model that runs now has captured of its layers so far, by kind ("hidden_states"): lists that
    hooks on the layers go on filling. Empty where nothing is captured."""
    capturing = sys.modules.get(_CAPTURING)
    active = None if capturing is None else capturing._active_collector.get()
    return {key: value for key, value in (active or {}).items() if isinstance(value, list)}


def install_capture(model: nn.Module) -> None:
    """Put the hooks that capture on the layers that are now in ``model``, instead of at the first forward that captures."""
    capturing = sys.modules.get(_CAPTURING)
    if capturing is not None:
        for module in model.modules():
            # Where a model inside has them already, those around it would put them there once more.
            if hasattr(module, "_can_record_outputs") and not any(_INSTALLED in vars(child) for child in module.modules()):
                capturing.maybe_install_capturing_hooks(module)


def is_capture(hook: object) -> bool:
    """Whether a forward hook is one of those."""
    return getattr(hook, "__module__", None) == _CAPTURING
