"""The repeated blocks that this rank holds, and their passes for overlap and compilation.

Blocks are compiled after they have been cut, filled and sharded. Only a block's forward is
compiled. The block's own hooks, which the pipeline and other observers use, and its recomputation
are outside of the compiled forward. Recomputed forwards are therefore compiled too. All blocks of a
kind share one graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from lightning_ptdp.forward.fused import missing_compiler
from lightning_ptdp.forward.own_forward import OwnForward, replace_forward
from lightning_ptdp.pipeline.containers import Blocks, layers_of
from lightning_ptdp.pipeline.discover import find_blocks
from lightning_ptdp.pipeline.placeholders import Placeholder
from lightning_ptdp.shims.torch import is_compiled, with_late_waits
from lightning_ptdp.shims.torch_distributed import connect_symmetric_memory
from lightning_ptdp.tensor_parallel.linear import ParallelLayer
from lightning_ptdp.tensor_parallel.parallel_product import Pieces
from lightning_ptdp.world.mesh import Group

CompilePolicy = Literal["none", "blocks", "auto"]


class LocalBlock(NamedTuple):
    """A block of this rank.

    Attributes:
        number: Its number in the sequence of all layers.
        name: Its dotted name.
        module: The block.
    """

    number: int
    name: str
    module: nn.Module


def local_blocks(module: nn.Module, blocks: Blocks | None) -> Iterator[LocalBlock]:
    """Yield the blocks of ``module`` that are not on other stages.

    ``blocks`` names the repeated containers; None: they are found.

    Raises:
        ValueError: No container is found.
    """
    layers = layers_of(module, find_blocks(module) if blocks is None else blocks)
    for number, layer in enumerate(layers):
        block = module.get_submodule(layer.name)
        if not isinstance(block, Placeholder):
            yield LocalBlock(number, layer.name, block)


# ---- Overlap of the collectives of tensor-parallel layers with their own products ----------------


_SYMMETRIC_BYTES = 2**20
"""Size of a first allocation, which finds unreachable ranks before the first step."""


def overlap_collectives(module: nn.Module, *, pieces: Pieces, group: Group) -> None:
    """Let the parallel layers multiply in pieces, those outside of the blocks included.

    Args:
        module: The module after ``parallelize``.
        pieces: The option ``tensor_overlap``.
        group: The tensor group.
    """
    if pieces == "symmetric":
        connect_symmetric_memory(group.name, _SYMMETRIC_BYTES)
    for layer in module.modules():
        if isinstance(layer, ParallelLayer):
            layer.pieces = pieces


# ---- Compilation ---------------------------------------------------------------------------------


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
    """Compile this rank's blocks in place.

    Args:
        module: The module after ``parallelize``.
        policy: "blocks", or "auto" to compile on CUDA only.
        blocks: Dotted names of the repeated containers; found if None.
        device: Device of the module.
        options: Options of ``torch.compile``.

    Raises:
        ValueError: There is no container, or, with "blocks", no compiler.
    """
    if policy == "auto" and device.type != "cuda":
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
