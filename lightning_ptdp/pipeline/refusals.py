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
    "something is computed between the repeated blocks or behind them (a sum around a block, a "
    "loss, a log) from what modules of an "
    "earlier pipeline stage computed before them. Only what blocks are given and return crosses "
    "to the later stages: move it into the "
    "blocks, compute it anew behind them, or use pipeline_parallel_size=1"
)
NOT_PASSED = (
    "a tensor that a block on an earlier pipeline stage returned is used, but the model does not "
    "pass it on to the next block, so it "
    "does not cross. Where the model collects over its blocks what they return (all hidden "
    "states, losses of routers, attention "
    "weights), let all of it cross with ParallelPlan(collects=True), carry a sum through the "
    "blocks (x, total = block(x, total)), or use "
    "pipeline_parallel_size=1"
)


def lost_argument(name: str, path: Path, place: str) -> StageError:
    """Return the error for an argument that only another stage has computed.

    ``place`` is the list of the plan that fixes it.
    """
    return StageError(
        f"block '{name}' is given a tensor ({_place(path)}) that modules of another pipeline "
        "stage computed. Name these in "
        f"the plan as ones that run in front of it: ParallelPlan({place}=(...,)), or use "
        "pipeline_parallel_size=1"
    )


def unsent_argument(name: str, path: Path) -> StageError:
    """Return the error for an argument that no block before the boundary received.

    The argument comes from before the blocks.
    """
    return StageError(
        f"block '{name}' is given a tensor ({_place(path)}) that was computed before the repeated "
        "blocks, but no "
        "block up to the first one of the next pipeline stage is given it there, so it does not "
        "cross. Give it to every "
        "block, or use pipeline_parallel_size=1"
    )


def changed_argument(name: str, path: Path) -> StageError:
    """Return the error for an outside argument that differs from the previous block's."""
    return StageError(
        f"block '{name}' is given another tensor ({_place(path)}) than the block before it, "
        "computed outside the blocks; what "
        "crosses a pipeline boundary beside the blocks' own results must be one tensor for all of "
        "them. Compute it inside the "
        "blocks, or use pipeline_parallel_size=1"
    )


def _place(path: Path) -> str:
    return f"argument {path[0]}" if isinstance(path[0], int) else f"'{path[0]}'"


def computed_between(name: str) -> StageError:
    """Return the error for a block whose input is not the previous block's output."""
    return StageError(
        f"something is computed between the repeated blocks, before block '{name}': its input is "
        "not what the block before it "
        "returned. Move it into the blocks, or use pipeline_parallel_size=1"
    )
