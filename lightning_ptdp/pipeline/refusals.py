"""Error messages for tensors that cannot cross a stage boundary, with the remedy."""

from __future__ import annotations

from lightning_ptdp.pipeline.crossing import Path, StageError

__all__ = [
    "LOST",
    "NOT_PASSED",
    "changed_argument",
    "computed_between",
    "lost_argument",
    "unsent_argument",
]

LOST = (
    "the code between or after the repeated blocks (a sum around a block, a loss, a log) uses "
    "values that modules of an earlier pipeline stage computed before the blocks. Only inputs "
    "and outputs of blocks are sent to later stages. Move this code into the blocks, compute "
    "the values again after the blocks, or use pipeline_parallel_size=1"
)
NOT_PASSED = (
    "the step uses a tensor that a block on an earlier pipeline stage returned, but the model "
    "does not pass it to the next block, so it is not sent. If the model collects outputs of "
    "its blocks (all hidden states, losses of routers, attention weights), send all of them "
    "with ParallelPlan(collects=True), carry a sum through the blocks (x, total = block(x, "
    "total)), or use pipeline_parallel_size=1"
)


def lost_argument(name: str, path: Path, place: str) -> StageError:
    """Return the error for an argument that only another stage has computed.

    ``place`` is the list of the plan that fixes it.
    """
    return StageError(
        f"block '{name}' has an input ({_place(path)}) that modules of another pipeline stage "
        "computed. Name these modules in the plan as ones that run before the block: "
        f"ParallelPlan({place}=(...,)), or use pipeline_parallel_size=1"
    )


def unsent_argument(name: str, path: Path) -> StageError:
    """Return the error for an argument that no block before the boundary received.

    The argument comes from before the blocks.
    """
    return StageError(
        f"block '{name}' has an input ({_place(path)}) that was computed before the repeated "
        "blocks, but no block up to the first one of the next pipeline stage receives it "
        "there, so it is not sent. Pass it to every block, or use pipeline_parallel_size=1"
    )


def changed_argument(name: str, path: Path) -> StageError:
    """Return the error for an outside argument that differs from the previous block's."""
    return StageError(
        f"block '{name}' has another input ({_place(path)}) than the block before it, computed "
        "outside the blocks. Apart from the outputs of blocks, an input that crosses a stage "
        "boundary must be the same tensor for all blocks. Compute it inside the blocks, or "
        "use pipeline_parallel_size=1"
    )


def _place(path: Path) -> str:
    return f"argument {path[0]}" if isinstance(path[0], int) else f"'{path[0]}'"


def computed_between(name: str) -> StageError:
    """Return the error for a block whose input is not the previous block's output."""
    return StageError(
        f"the model computes something before block '{name}': the input of the block is not "
        "the output of the previous block. Move the computation into the blocks, or use "
        "pipeline_parallel_size=1"
    )
