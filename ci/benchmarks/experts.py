"""One layer of experts over two ranks: ours beside transformers' expert parallelism and an
all-gather by hand, in turns; and the ideal.

Run: python ci/benchmarks/experts.py [--rounds 15] [--tokens 2048]

Mixtral's experts as transformers has them (gated, float32, its grouped products), two experts a
token, forward and backward. Every rank has tokens of its own. Weights and routes are the same in
all, and outputs and gradients are compared before anything is timed. transformers' is its
all-to-all, put in place by its own ``apply_expert_parallelism``. By hand: all tokens are gathered,
each rank computes what its experts make of them, and the sums are scattered. The ideal is the whole
layer on each rank alone with its own tokens, which are
half of all: as many rows, and nothing is sent.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Comparison, compare, parse_options, report
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_ptdp.tensor_parallel import Experts, shard_module
from lightning_ptdp.tensor_parallel.collectives import gather_sequence, scatter_sequence
from lightning_ptdp.tensor_parallel.kinds import ModulePlace
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import Group, ProcessMesh

E, NUMBER, CHOSEN = 2, 8, 2
PARAMETERS = ("gate_up_proj", "down_proj")
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def make_experts(hidden: int, inner: int) -> nn.Module:
    """The layer, whole."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=hidden, intermediate_size=inner, num_local_experts=NUMBER)
    config._experts_implementation = "grouped_mm"
    experts: nn.Module = MixtralExperts(config)
    torch.manual_seed(1)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    return experts


def ours(experts: nn.Module, group: Group) -> nn.Module:
    """Our layer."""
    layer, _ = shard_module(
        copy.deepcopy(experts),
        Experts(),
        ModulePlace(group=group, sequence_parallel=False, shared={}, name="experts"),
    )
    return layer


def transformers_own(experts: nn.Module) -> nn.Module:
    """transformers' layer."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    model = nn.ModuleDict({"experts": copy.deepcopy(experts)})
    mesh = init_device_mesh("cpu", (E, 1), mesh_dim_names=("ep", "tp"))
    plan = {
        **{f"experts.{name}": "grouped_gemm" for name in PARAMETERS},
        "experts": "ep_dispatch_experts",
    }
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, ep_implementation="all_to_all")
    return model["experts"]


class Gathered(nn.Module):
    """Expert parallelism as written by hand."""

    def __init__(self, experts: nn.Module, group: Group) -> None:
        super().__init__()
        self.experts: Any = copy.deepcopy(experts)
        self.group, self.here = group, NUMBER // E
        for name in PARAMETERS:
            part = experts.get_parameter(name).chunk(E)[group.rank]
            self.experts.register_parameter(name, nn.Parameter(part.detach().clone()))
        # Its way to leave out what is for experts elsewhere: an index behind those here.
        self.experts.num_experts, self.experts._is_expert_parallel = self.here, True

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        x, weights = (gather_sequence(each, self.group, 0) for each in (x, weights))
        every = index.new_empty(E * index.size(0), index.size(1))
        dist.all_gather_into_tensor(every, index, group=self.group.handle)
        elsewhere = every // self.here != self.group.rank
        every = torch.where(elsewhere, self.here, every % self.here)
        return scatter_sequence(
            self.experts(x, every, weights.masked_fill(elsewhere, 0.0)), self.group, 0
        )


def step(layer: Layer, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of tokens and weights of one forward and backward."""
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    output = layer(x, index, weights)
    output.backward(torch.ones_like(output))
    assert x.grad is not None and weights.grad is not None
    return output.detach(), x.grad, weights.grad


def seconds(layer: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    """Return the time of the slowest rank."""
    layer.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    step(layer, *inputs)
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def gradient(layer: nn.Module, name: str) -> Tensor:
    """Return the gradients of the local experts."""
    found: Any = next(
        parameter.grad for key, parameter in layer.named_parameters() if key.endswith(name)
    )
    return found.to_local() if hasattr(found, "to_local") else found


def measure(
    hidden: int, inner: int, options: argparse.Namespace, rank: int, group: Group
) -> list[Comparison]:
    """All layers of one size, in turns."""
    experts = make_experts(hidden, inner)
    layers = {"ours": ours(experts, group), "transformers' all-to-all": transformers_own(experts)}
    layers |= {
        "all-gather by hand": Gathered(experts, group),
        "whole on each rank (ideal)": experts,
    }
    torch.manual_seed(2 + rank)
    x = torch.randn(options.tokens, hidden)
    weights, index = torch.randn(options.tokens, NUMBER).softmax(-1).topk(CHOSEN, -1)
    expected = step(layers["ours"], x, index, weights)
    for name, layer in layers.items():
        layer.zero_grad()
        for found, wanted in zip(step(layer, x, index, weights), expected, strict=True):
            torch.testing.assert_close(
                found, wanted, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
    for peer in list(layers.values())[1:3]:
        for name in PARAMETERS:
            torch.testing.assert_close(
                gradient(layers["ours"], name), gradient(peer, name), rtol=1e-3, atol=1e-3
            )
    times: dict[str, list[float]] = {name: [] for name in layers}
    for turn in range(options.rounds + 2):
        for name, layer in layers.items():
            taken = seconds(layer, (x, index, weights))
            if turn > 1:
                times[name].append(taken)
    return [
        compare(
            name=f"experts h={hidden} f={inner} e={E}",
            ours=times["ours"],
            peer=times[peer],
            peer_name=peer,
            unit="s",
        )
        for peer in list(layers)[1:]
    ]


def main_of_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    """One process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=E)
    mesh = ProcessMesh.create(
        layout=ParallelLayout(world_size=E, expert_parallel_size=E), rank=rank
    )
    sizes = ((256, 512), (512, 256))
    rows = [
        row
        for hidden, inner in sizes
        for row in measure(hidden, inner, options, rank, mesh.group("expert"))
    ]
    if rank == 0:
        report("Expert parallelism, forward and backward of a layer", rows)
    dist.destroy_process_group()


def main() -> None:
    """Start both ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank")
    options = parse_options(parser, rounds=1, tokens=64)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            main_of_rank, (options, os.path.join(folder, "store")), nprocs=E, start_method="fork"
        )


if __name__ == "__main__":
    main()
