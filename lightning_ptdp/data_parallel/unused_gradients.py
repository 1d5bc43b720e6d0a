"""Gradients of parameters that no step has used since the optimizer's last step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.data_parallel.gradient_store import GradientStore
from lightning_ptdp.parameters.managed_parameter import ManagedParameters
from lightning_ptdp.world.mesh import ProcessMesh


class UnusedGradients:
    """Removes the zero gradients of parameters that no rank has used.

    An optimizer moves a parameter with a zero gradient by its momentum and decay. In one process
    such a parameter has no gradient, and does not move.

    Args:
        parameters: This rank's parameters.
        count: Number of the uncut model's parameters.
        mesh: This rank's position and groups.
        device: This rank's device.
    """

    def __init__(
        self, parameters: ManagedParameters, *, count: int, mesh: ProcessMesh, device: torch.device
    ) -> None:
        # Stages and tensor ranks may share a parameter that only some of them use.
        self._group = mesh.world
        orders = [managed.order for managed in parameters.values()]
        self._held = torch.zeros(count)
        self._held[orders] = 1
        self._held = self._held.to(device, torch.uint8)
        self._wait: Callable[[], object] = bool  # for the last exchange

    def remove(self, store: GradientStore) -> None:
        """Remove the gradients of unused parameters before the optimizer's step.

        Collective over the world. Only a rank with unused parameters waits for the others' answer.
        """
        unused = store.unused()
        if self._group.size > 1:
            used = self._exchange([managed.order for managed in unused])
            if not unused:
                return
            flags = used().tolist()
            unused = [managed for managed in unused if not flags[managed.order]]
        for managed in unused:
            if managed.stepped is not None:
                managed.stepped.grad = None

    def _exchange(self, unused: list[int]) -> Callable[[], Tensor]:
        """Start to exchange which parameters are used; return a function that waits for it."""
        self._wait()  # the memory of the last exchange can now be given away
        used = self._held.clone()
        if unused:
            used[unused] = 0
        work = dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group.handle, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return used

        self._wait = wait
        return wait
