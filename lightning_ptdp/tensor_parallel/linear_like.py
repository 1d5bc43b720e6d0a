"""Modules that multiply by a weight: ``nn.Linear`` and Hugging Face's ``Conv1D``.

``nn.Linear`` stores its weight as (out, in). The ``Conv1D`` of Hugging Face's GPT-2 stores it as
(in, out).
"""

from __future__ import annotations

from torch import nn

# Subclasses of nn.Linear with a different forward that computes the same result.
_AS_LINEAR = frozenset({("transformers.models.falcon.modeling_falcon", "FalconLinear")})


def is_conv1d(module: nn.Module) -> bool:
    """Return True if the module is a ``transformers.pytorch_utils.Conv1D``.

    The class is recognized by name, so that transformers need not be imported.
    """
    return any(
        base.__name__ == "Conv1D" and base.__module__ == "transformers.pytorch_utils"
        for base in type(module).__mro__
    )


def is_linear(module: nn.Module) -> bool:
    """Return True if the module multiplies by a weight."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def stores_outputs_last(module: nn.Module) -> bool:
    """Return True if the output features are the last dimension of the weight.

    This holds for ``Conv1D`` and ``nn.Embedding``.
    """
    return is_conv1d(module) or isinstance(module, nn.Embedding)


def output_input_sizes(module: nn.Module) -> tuple[int, int]:
    """Return (output features, input features)."""
    rows, columns = module.get_parameter("weight").shape
    return (columns, rows) if stores_outputs_last(module) else (rows, columns)


def has_own_forward(module: nn.Module, base: type[nn.Module]) -> bool:
    """Return True if a subclass of ``base`` computes something else.

    An example is an embedding that scales its output.
    """
    kind = type(module)
    return (
        isinstance(module, base)
        and kind.forward is not base.forward
        and (kind.__module__, kind.__name__) not in _AS_LINEAR
    )
