"""A transformer layer over two tensor-parallel ranks: ours beside DTensor's ``parallelize_module``
and Megatron-core's layer, in turns.

Run: python ci/benchmarks/tensor_parallel.py [--rounds 15] [--tokens 256] [--megatron FOLDER]

One layer (LayerNorm, fused QKV, causal attention by torch's kernel, GELU, biases; float32), forward
and backward, with and without sequence parallelism. Weights are the same in all, and outputs and
gradients are compared before anything is timed. Ours and DTensor's are the same module, our GPT's
block. Megatron-core's is its own, with torch's attention and norms, and buffers on the CPU, in the
place of what needs CUDA; it is left out where it cannot be imported (``pip install --no-deps
--target FOLDER megatron-core`` is enough)."""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from harness import Comparison, compare, parse_options, report
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_ptdp.models import GPTConfig
from lightning_ptdp.models.gpt import Block
from lightning_ptdp.tensor_parallel import Column, Row, shard_module
from lightning_ptdp.tensor_parallel.kinds import ModulePlace
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import Group, ProcessMesh

T, SAMPLES, HEAD = 2, 2, 64


def make_block(hidden: int) -> Block:
    """The layer, whole."""
    torch.manual_seed(1)
    config = GPTConfig.gpt2(
        num_layers=1, hidden_size=hidden, num_heads=hidden // HEAD, sequence_length=4096
    )
    block = Block(config)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return block


def ours(block: Block, hidden: int, group: Group, sequence_parallel: bool) -> nn.Module:
    """Our layer."""
    layer = copy.deepcopy(block)
    kinds = {
        "attention.qkv": Column(parts=(hidden, hidden, hidden)),
        "attention.projection": Row(),
        "mlp.up": Column(),
        "mlp.down": Row(),
    }
    for name, kind in kinds.items():
        new, _ = shard_module(
            layer.get_submodule(name),
            kind,
            ModulePlace(group=group, sequence_parallel=sequence_parallel, shared={}, enters=True),
        )
        layer.set_submodule(name, new)
    return layer


def dtensors(block: Block, group: Group, sequence_parallel: bool) -> nn.Module:
    """DTensor's layer: its contiguous rows of the fused projection are the ones that our members
    have."""
    layer = copy.deepcopy(block)
    with torch.no_grad():
        qkv = layer.attention.qkv
        for parameter in (qkv.weight, qkv.bias):
            parameter.copy_(torch.cat([fused_rows(parameter, rank) for rank in range(T)]))
    mesh = init_device_mesh("cpu", (T,))
    if not sequence_parallel:
        plan: dict[str, Any] = {
            "attention.qkv": ColwiseParallel(),
            "attention.projection": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
    else:
        gather = {
            "input_layouts": (Shard(1), None, None),
            "desired_input_layouts": (Replicate(), None, None),
        }
        plan = {
            "norm_1": SequenceParallel(),
            "attention": PrepareModuleInput(**gather),
            "attention.qkv": ColwiseParallel(),
            "attention.projection": RowwiseParallel(output_layouts=Shard(1)),
            "norm_2": SequenceParallel(),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return parallelize_module(layer, mesh, plan)


class TorchAttention(nn.Module):
    """torch's attention for Megatron-core's layer: (s, b, n, d) -> (s, b, n d)."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        )


class TorchNorm(nn.LayerNorm):
    """torch's norm for Megatron-core's layer, whose own refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)


def megatrons(
    block: Block, hidden: int, rank: int, sequence_parallel: bool
) -> Callable[[Tensor], Tensor] | None:
    """Megatron-core's layer on (b, s, h), or None where it is not there."""
    try:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.spec_utils import build_module
        from megatron.core.transformer.transformer_config import TransformerConfig
    except ImportError:
        return None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]  # where it makes its buffers
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=T, create_gloo_process_groups=False
        )
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=hidden // HEAD,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=T,
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        activation_func=gelu_tanh,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TorchNorm
    spec.submodules.self_attention.submodules.core_attention = TorchAttention
    layer = build_module(spec, config=config, layer_number=1)
    copy_weights(block, layer, rank)

    def run(x: Tensor) -> Tensor:
        output: Tensor = layer(x.transpose(0, 1), attention_mask=None)[0]
        return output.transpose(0, 1)

    run.parameters = list(layer.parameters())  # type: ignore[attr-defined]
    return run


def gelu_tanh(x: Tensor) -> Tensor:
    """Our GPT's activation."""
    return F.gelu(x, approximate="tanh")


def fused_rows(parameter: Tensor, rank: int) -> Tensor:
    """[q_r | k_r | v_r] of the fused projection's parameter."""
    return torch.cat([part.chunk(T)[rank] for part in parameter.chunk(3)])


@torch.no_grad()
def copy_weights(block: Block, layer: Any, rank: int) -> None:
    """The whole block's weights into a rank's part of Megatron-core's layer, whose fused projection
    goes head by head."""
    attention, mlp = layer.self_attention, layer.mlp

    def by_heads(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (3, -1, HEAD)).transpose(0, 1).flatten(0, 2)

    pairs = [
        (attention.linear_qkv.weight, by_heads(fused_rows(block.attention.qkv.weight, rank))),
        (attention.linear_qkv.bias, by_heads(fused_rows(block.attention.qkv.bias, rank))),
        (attention.linear_proj.weight, block.attention.projection.weight.chunk(T, 1)[rank]),
        (attention.linear_proj.bias, block.attention.projection.bias),
        (mlp.linear_fc1.weight, block.mlp.up.weight.chunk(T)[rank]),
        (mlp.linear_fc1.bias, block.mlp.up.bias.chunk(T)[rank]),
        (mlp.linear_fc2.weight, block.mlp.down.weight.chunk(T, 1)[rank]),
        (mlp.linear_fc2.bias, block.mlp.down.bias),
        (layer.input_layernorm.weight, block.norm_1.weight),
        (layer.input_layernorm.bias, block.norm_1.bias),
        (layer.pre_mlp_layernorm.weight, block.norm_2.weight),
        (layer.pre_mlp_layernorm.bias, block.norm_2.bias),
    ]
    for target, source in pairs:
        target.copy_(source)


def step(layer: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Output and input gradient of one forward and backward."""
    x = x.detach().requires_grad_()
    output = layer(x)
    output.backward(torch.ones_like(output))
    assert x.grad is not None
    return output.detach(), x.grad


def seconds(layer: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor) -> float:
    """Return the time of the slowest rank."""
    for parameter in parameters:
        parameter.grad = None
    dist.barrier()
    start = time.perf_counter()
    step(layer, x)
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def measure(
    hidden: int, tokens: int, rounds: int, sequence_parallel: bool, rank: int, group: Group
) -> list[Comparison]:
    """All layers of one size, in turns."""
    block = make_block(hidden)
    own = ours(block, hidden, group, sequence_parallel)
    dtensor = dtensors(block, group, sequence_parallel)
    megatron = megatrons(block, hidden, rank, sequence_parallel)
    layers: dict[str, tuple[Callable[[Tensor], Tensor], list[Tensor]]] = {
        "ours": (own, list(own.parameters()))
    }
    layers["DTensor parallelize_module"] = (dtensor, list(dtensor.parameters()))
    if megatron is not None:
        layers["Megatron-core TransformerLayer"] = (megatron, megatron.parameters)  # type: ignore[attr-defined]
    x = torch.randn(SAMPLES, tokens, hidden, generator=torch.Generator().manual_seed(2))
    if sequence_parallel:
        x = x.chunk(T, 1)[rank].contiguous()
    expected = step(own, x)
    for name, (layer, _) in layers.items():
        for found, wanted in zip(step(layer, x), expected, strict=True):
            torch.testing.assert_close(
                found, wanted, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
    times: dict[str, list[float]] = {name: [] for name in layers}
    for turn in range(rounds + 2):
        for name, (layer, parameters) in layers.items():
            taken = seconds(layer, parameters, x)
            if turn > 1:
                times[name].append(taken)
    mode = ", sequence parallel" if sequence_parallel else ""
    return [
        compare(
            name=f"layer h={hidden} t={T}{mode}",
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
    if options.megatron:
        sys.path.insert(0, options.megatron)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=T)
    mesh = ProcessMesh.create(
        layout=ParallelLayout(world_size=T, tensor_parallel_size=T), rank=rank
    )
    rows = [
        row
        for hidden in options.hidden
        for sequence_parallel in (False, True)
        for row in measure(
            hidden, options.tokens, options.rounds, sequence_parallel, rank, mesh.group("tensor")
        )
    ]
    if rank == 0:
        report("Tensor parallelism, forward and backward of a layer", rows)
    dist.destroy_process_group()


def main() -> None:
    """Start both ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--tokens", type=int, default=256, help="tokens of each of the two sequences"
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 1024], help="layer widths")
    parser.add_argument("--megatron", default="", help="folder to import megatron.core from")
    options = parse_options(parser, rounds=1, tokens=16, hidden=[128])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            main_of_rank, (options, os.path.join(folder, "store")), nprocs=T, start_method="fork"
        )


if __name__ == "__main__":
    main()
