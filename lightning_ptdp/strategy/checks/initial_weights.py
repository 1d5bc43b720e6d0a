"""Checks of the initial weights that a module names, against the module."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.exchange import HuggingFaceWeights, names_in
from lightning_ptdp.models.pretrained_folder import InitialWeights, local_folder
from lightning_ptdp.parameters.materialize import awaits_values
from lightning_ptdp.shims.lightning import LightningModule
from lightning_ptdp.strategy.checks.whole_model import whole_model

__all__ = ["check_initial_weights", "open_initial_weights"]


def check_initial_weights(module: LightningModule, config: PTDPConfig) -> None:
    """Check that the files named by the module's ``initial_weights()`` exist and fit.

    Only their headers are read.

    Raises:
        ValueError: They do not; lists the names and shapes that differ.
    """
    if hasattr(module, "initial_weights") and config.meta_init:
        open_initial_weights(whole_model(module, config))


def open_initial_weights(module: nn.Module) -> HuggingFaceWeights | None:
    """Open the weights that the module's ``initial_weights()`` names.

    The result is None if it names none, or if the module has values already.

    Raises:
        CheckpointError: The files are missing or do not fit.
    """
    give: Callable[[], InitialWeights | None] | None = getattr(module, "initial_weights", None)
    source = give() if give is not None else None
    if source is None or not awaits_values(module):
        return None
    first = {parameter: name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    aliases = {name: first[parameter] for name, parameter in every if first[parameter] != name}
    weights = HuggingFaceWeights.open(
        local_folder(source.path), names_in(module, aliases, ignored=source.ignores)
    )
    try:
        weights.check(module, may_lack=source.may_lack)
    except CheckpointError as error:
        raise CheckpointError(f"path={source.path!r}: {error}") from None
    return weights
