"""What can be asked of a module without its tensors: models inspect their layers (``layers[0].self_attn.batch_first``)."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_ptdp.pipeline.crossing import StageError

__all__ = ["Shell", "check_kept", "forget", "plain_attributes"]


class Shell:
    """A child of a module that is not here: its public attributes that are neither parameters nor buffers; its children as shells."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, key: str) -> Any:
        check_kept(self, key)
        raise AttributeError(f"a module of another pipeline stage is asked for its attribute '{key}', which lives there with it")


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The public attributes of a module that are neither parameters nor buffers; its children as shells."""
    plain = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    children = {key: Shell(plain_attributes(child)) for key, child in module._modules.items() if child is not None}
    return {**children, **plain}


def forget(shell: Any, path: tuple[str, ...]) -> None:
    """Whoever asks ``shell`` for what stands at ``path`` gets an error from now on, since its forward changes it elsewhere."""
    *parents, key = path
    for parent in parents:
        shell = vars(shell).get(parent)
        if shell is None:
            return
    vars(shell).pop(key, None)
    vars(shell).setdefault("_ptdp_forgotten", {})[key] = ".".join(path)


def check_kept(shell: Any, key: str) -> None:
    """Check that ``key`` was not forgotten.

    Raises:
        StageError: It was.
    """
    path = vars(shell).get("_ptdp_forgotten", {}).get(key)
    if path is not None:
        raise StageError(
            f"'{path}' of a block of another pipeline stage is read, but blocks keep a tensor there in their forward, which does not "
            "cross. Let the blocks return it (x, loss = block(x), with ParallelPlan(collects=True)), or use pipeline_parallel_size=1"
        )
