"""Context parallelism: attention over two ranks beside its ideal, and how the sequence grows with
the ranks at a fixed memory.

Run: python ci/benchmarks/context_parallel.py [--rounds 10] [--tokens 1024]

1. Causal attention, forward and backward, ring and all-to-all over c = 2 ranks, beside 1/c of the
   time that torch's own kernel takes for the whole sequence on one of these ranks: the ideal.
   torch's ``context_parallel`` has no attention for CPU (``aten::
   _scaled_dot_product_flash_attention_for_cpu`` has no sharding strategy); where there is a kernel
   it runs as a third.
2. A GPT trained on c times the tokens over c ranks: bytes that a rank keeps for the backward,
   beside those of one rank and the shortest sequence. A ratio of 1 says that the trainable sequence
   grows linearly with c.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from harness import Comparison, compare, parse_options, report
from torch import Tensor

from lightning_ptdp.attention import ATTENTIONS, shard_sequence
from lightning_ptdp.attention.attention_protocol import AttentionCall
from lightning_ptdp.context_parallel import ContextParallel
from lightning_ptdp.forward.surroundings import Forward
from lightning_ptdp.models import GPT, GPTConfig
from lightning_ptdp.world.mesh import Group

SAMPLES, HEADS, CHANNELS = 1, 8, 64
SHORT = 256  # tokens a rank, in the second part
SIZES = (1, 2, 4)


def seconds(attend: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    """One forward and backward of the slowest rank."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    dist.barrier()
    start = time.perf_counter()
    output = attend(*leaves)
    output.backward(torch.ones_like(output))
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def attention_rows(tokens: int, rounds: int, group: Group) -> list[Comparison]:
    """The first part."""
    torch.manual_seed(0)
    whole = [torch.randn(SAMPLES, HEADS, tokens, CHANNELS) for _ in range(3)]
    parts = [shard_sequence(x, 2, rank=group.rank, size=group.size) for x in whole]

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    kinds = {name.replace("_", "-"): kind(group) for name, kind in ATTENTIONS.items()}
    for attention in kinds.values():
        expected = shard_sequence(torchs(*whole), 2, rank=group.rank, size=group.size)
        torch.testing.assert_close(attention(AttentionCall(*parts, causal=True)), expected)
    times: dict[str, list[float]] = {name: [] for name in (*kinds, "ideal")}
    for turn in range(rounds + 1):
        measured = {
            name: seconds(lambda *x, a=attention: a(AttentionCall(*x, causal=True)), parts)
            for name, attention in kinds.items()
        }
        measured["ideal"] = seconds(torchs, whole) / group.size
        if turn:
            for name, value in measured.items():
                times[name].append(value)
    return [
        compare(
            name=f"attention s={tokens} c={group.size}, {name}",
            ours=times[name],
            peer=times["ideal"],
            peer_name=f"1/{group.size} of torch's on one rank",
            unit="s",
        )
        for name in kinds
    ]


def kept_bytes(tokens: int, group: Group) -> float:
    """Return the bytes that a rank keeps for the backward of a GPT, each storage once, without
    parameters; the maximum of all ranks."""
    torch.manual_seed(0)
    config = GPTConfig.llama(
        vocabulary_size=512,
        num_layers=4,
        hidden_size=256,
        num_heads=4,
        num_kv_heads=2,
        sequence_length=tokens,
    )
    model = GPT(config)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    batch = {"input_ids": torch.randint(512, (1, tokens))}
    batch["labels"] = batch["input_ids"].roll(-1, 1)
    storages: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return x

    def loss(own: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(own["input_ids"]).flatten(0, 1), own["labels"].flatten())

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        if group.size == 1:
            kept: Any = loss(batch)
        else:
            forward = Forward(hook="training_step", full_batch=batch)
            parallel = ContextParallel(group=group)
            parallel.attach(model)
            with parallel.around(forward):
                kept = loss(forward.batch)
    total = torch.tensor(float(sum(storages.values())))
    kept.backward()
    if group.size > 1:
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=group.handle)
    return float(total)


def main_of_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    """One process of four."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZES[-1])
    groups = {size: dist.new_group(list(range(size))) for size in SIZES[1:]}
    mine = {
        size: Group(groups[size], tuple(range(size)), rank) for size in SIZES[1:] if rank < size
    }
    rows: list[Comparison] = []
    alone = kept_bytes(SHORT, Group())
    for size in SIZES[1:]:
        if size in mine:
            bytes_kept = kept_bytes(SHORT * size, mine[size])
            rows.append(
                Comparison(
                    name=f"GPT kept for backward, s={SHORT * size} c={size}",
                    ours=bytes_kept / 2**20,
                    peer=alone / 2**20,
                    peer_name=f"one rank, s={SHORT}",
                    ratio=bytes_kept / alone,
                    unit="MiB a rank",
                )
            )
    dist.destroy_process_group()
    if rank < 2:
        dist.init_process_group("gloo", init_method=f"file://{store}2", rank=rank, world_size=2)
        group = Group(dist.group.WORLD, (0, 1), rank)
        rows = [*attention_rows(options.tokens, options.rounds, group), *rows]
        if rank == 0:
            report("Context parallelism", rows)
        dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--tokens", type=int, default=1024, help="of the whole sequence, in the first part"
    )
    options = parse_options(parser, rounds=1, tokens=64)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            main_of_rank,
            (options, os.path.join(folder, "store")),
            nprocs=SIZES[-1],
            start_method="fork",
        )


if __name__ == "__main__":
    main()
