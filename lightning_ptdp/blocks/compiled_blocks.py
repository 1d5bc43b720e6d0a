"""Compilation of the repeated blocks by ``torch.compile``, each in place.

Blocks are compiled after they have been cut, filled and sharded. Only a block's forward is
compiled. The block's own hooks, which the pipeline and other observers use, and its recomputation
are outside of the compiled forward. Recomputed forwards are therefore compiled too. All blocks of a
kind share one graph."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from lightning_ptdp.blocks.local_blocks import local_blocks
from lightning_ptdp.forward.fused import missing_compiler
from lightning_ptdp.forward.own_forward import OwnForward, give_back_forwards, replace_forward
from lightning_ptdp.pipeline.containers import Blocks
from lightning_ptdp.shims.torch import is_compiled, with_late_waits

CompilePolicy = Literal["none", "blocks", "auto"]


@dataclass(frozen=True, eq=False, kw_only=True)
class CompiledForward(OwnForward):
    """Compiled forward of a module; a copy of the module compiles again.

    Attributes:
        options: Options of ``torch.compile``.
    """

    options: Mapping[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        if self.replaced is None:
            return self._compiled(self.module, *args, **kwargs)
        return self._compiled(*args, **kwargs)

    @cached_property
    def _compiled(self) -> Any:
        # Compile the function, not the bound method: all blocks of a class then share the compiled
        # code.
        return torch.compile(
            type(self.module).forward if self.replaced is None else self.replaced, **self.options
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_compiled"}


def compile_blocks(
    module: nn.Module,
    *,
    policy: CompilePolicy,
    blocks: Blocks | None,
    device: torch.device,
    options: Mapping[str, Any],
) -> None:
    """Compile this rank's blocks in place, after undoing an earlier call.

    Args:
        module: The module after ``parallelize``.
        policy: "blocks", or "auto" to compile on CUDA only.
        blocks: Dotted names of the repeated containers; found if None.
        device: Device of the module.
        options: Options of ``torch.compile``.

    Raises:
        ValueError: There is no container, or, with "blocks", no compiler.
    """
    give_back_forwards(module, CompiledForward)
    if policy == "none" or (policy == "auto" and device.type != "cuda"):
        return
    try:
        check_compiler(device, options)
        stage_blocks = list(local_blocks(module, blocks))
    except ValueError as error:
        if policy == "blocks":
            raise
        warnings.warn(f"compile='auto' does not compile: {error}", stacklevel=2)
        return
    for block in stage_blocks:
        if not is_compiled(block.module):
            replace_forward(block.module, CompiledForward, options=with_late_waits(options))


def check_compiler(device: torch.device, options: Mapping[str, Any]) -> None:
    """Check that the machine has what torch's own compiler needs.

    Args:
        device: Device of the model.
        options: Options of ``torch.compile``.

    Raises:
        ValueError: Something is missing.
    """
    if options.get("backend", "inductor") != "inductor":
        return
    if missing := missing_compiler(device):
        raise ValueError(
            f"compile='blocks' needs {missing}, which was not found. Install it, "
            "or use compile_options={'backend': 'aot_eager'} or compile='none'"
        )
