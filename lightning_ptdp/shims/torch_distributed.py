"""Private and renamed functions of ``torch.distributed``; see ``torch.py``."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

_PLAIN_ERROR = re.compile(
    r"(Gloo \w+ failed with )?\[[^\]]*gloo/[^\]]*:\d+\]|Application timeout caused pair closure"
    r"|(Watchdog caught [^:]*: |Failed to \w+ )?NCCL (communicator|operation|[\w ]+ failed)"
)


def all_gather_single(
    output: torch.Tensor,
    source: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    async_op: bool = False,
) -> dist.Work:
    """Gather ``source`` of every rank, concatenated along dimension 0, into ``output``."""
    # Needed until torch 2.13, which renamed the function.
    function: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(output, source, group=group, async_op=async_op)


def reduce_scatter_single(
    output: torch.Tensor,
    source: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    async_op: bool = False,
) -> dist.Work:
    """Sum ``source`` over the ranks and keep this rank's slice along dimension 0."""
    # Needed until torch 2.13, which renamed the function.
    function: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return function(output, source, group=group, async_op=async_op)


def has_symmetric_products() -> bool:
    """Return True if this torch has the two fused products below.

    The code that registers them, and their memory, are private.
    """
    from torch.distributed import _symmetric_memory  # noqa: F401 - slow import, rarely needed

    return all(
        hasattr(torch.ops.symm_mem, name)
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    )


def connect_symmetric_memory(group: str, size: int) -> None:
    """Allocate ``size`` bytes of memory on each GPU of the group that all its members reach.

    Collective over the group. The memory grows when more is needed.
    """
    from torch.distributed import _symmetric_memory

    _symmetric_memory.get_symm_mem_workspace(cast(Any, group), min_size=size)


def all_gather_product(
    x: torch.Tensor, matrix: torch.Tensor, *, dim: int, group: str, keeps: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gathered ``x`` times a matrix, and the gathered ``x`` if it is kept.

    ``x`` of every member is concatenated along ``dim``. Each member's part is multiplied while the
    next one is read from its memory.
    """
    gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
        x, [matrix], dim, group, return_A=keeps
    )
    return product, gathered


def reduce_scatter_product(
    x: torch.Tensor, matrix: torch.Tensor, *, dim: int, group: str
) -> torch.Tensor:
    """Return this member's slice along ``dim`` of the group's sum of ``x`` times a matrix.

    Each member's part is sent to it while the next one is computed.
    """
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", dim, group)


def start_traced(name: str, x: torch.Tensor, *arguments: object) -> torch.Tensor:
    """Start a collective that a compiler can put into its graph.

    It is one of torch's functional collectives, whose Python functions are private and create
    tensor subclasses. The result must not be read before ``wait_traced``.
    """
    return getattr(torch.ops._c10d_functional, name)(x, *arguments)


def wait_traced(x: torch.Tensor) -> torch.Tensor:
    """Wait for ``start_traced`` and return its result."""
    return torch.ops._c10d_functional.wait_tensor(x)


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group with this name.

    A graph holds names; torch's accessor is private.
    """
    return dist.distributed_c10d._resolve_process_group(cast(Any, name))


def default_store() -> dist.Store:
    """Return the key-value store of the default process group.

    torch's accessor is private.
    """
    return dist.distributed_c10d._get_default_store()


def binds_device() -> bool:
    """Return True if a default NCCL group must be bound to its device.

    Until torch 2.14 it must not be: there is no ``lazy_init``, so new groups would be split from
    it.
    """
    return hasattr(dist.ProcessGroupNCCL.Options, "lazy_init")


def nccl_creator() -> str:
    """Return the qualified name of the function that creates torch's "nccl" groups."""
    backend: Any = dist.Backend
    if hasattr(backend, "_ensure_backend_registered"):  # needed since torch 2.15
        backend._ensure_backend_registered("nccl")
    plugin = backend._plugins.get("NCCL")
    # Until torch 2.14, torch creates them without a function, and a plugin replaces them.
    create = dist.init_process_group if plugin is None else plugin.creator_fn
    return f"{create.__module__}.{create.__qualname__}"


def nccl_versions() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the version of NCCL that torch was built with, and that of the loaded library."""
    nccl: Any = dist.ProcessGroupNCCL
    return nccl.get_build_nccl_version(), nccl.get_runtime_nccl_version()


def accepts_max_ctas() -> bool:
    """Return True if NCCL accepts a maximum number of thread blocks for a group."""
    return hasattr(getattr(dist.ProcessGroupNCCL.Options(), "config", None), "max_ctas")


def nccl_options(
    timeout: timedelta | None, *, high_priority: bool, max_ctas: int | None = None
) -> dist.ProcessGroupNCCL.Options:
    """Return the options of an NCCL group.

    Args:
        timeout: Time limit of the group; torch warns if its options have another limit.
        high_priority: Whether its kernels run before computation that waits for resources of the
            GPU.
        max_ctas: Thread blocks that its kernels may use; None: NCCL decides.

    Raises:
        ValueError: This NCCL accepts no number of thread blocks.
    """
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
    if binds_device():
        options.lazy_init = True
    if timeout is not None:
        options._timeout = timeout
    if max_ctas is not None:
        if not accepts_max_ctas():
            raise ValueError(
                f"channel_ctas={max_ctas} is not supported by the NCCL of this torch, which is "
                "too old. Leave it out"
            )
        options.config.max_ctas = max_ctas
    return options


def flight_record() -> bytes:
    """Return NCCL's latest operations and their progress, pickled as in torch's own dump.

    torch's analyzer (``torchfrtrace``) reads this form. (torch itself writes it only after a hang.)
    Each backend has a recorder. That of nccl2 exists since torch 2.15.
    """
    c10d: Any = torch._C._distributed_c10d
    records = [bytes(c10d._dump_nccl_trace())]
    if binds_device():
        records.append(bytes(c10d._dump_fr_trace(backend="nccl2")))
    return max(records, key=len)


def abort_process_groups() -> None:
    """Abort all operations on all process groups, and the groups.

    torch's function for all backends is private.
    """
    dist.distributed_c10d._abort_process_group()


def is_communication_error(error: BaseException | None) -> bool:
    """Return True if torch's communication failed.

    The error has a class of torch's own, except that errors of gloo and nccl2 are recognized only
    by their text.
    """
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and _PLAIN_ERROR.match(str(error)) is not None
    )
