"""Figures of the software on the devices: kernels, overlaps, bytes and host time, in a few numbers;
presets by name.

The same layout on the same devices takes twice as long with attention that writes its scores to
memory, or with a host that cannot launch as fast as small kernels run. What each number comes from
is said beside it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from lightning_ptdp.base.option_types import check_types

__all__ = ["SOFTWARE", "Software", "find_software"]


@dataclass(frozen=True, kw_only=True)
class Software:
    """A training program.

    Attributes:
        name: For tables.
        attention: "unfused" writes the s x s scores to memory and keeps them, "fused" does not;
            "tuned" is fused, too, by a kernel that is written for the device's own instructions.
        skips_masked: The attention kernel does not compute what the causal mask hides.
        elementwise: How operations between products go through memory: "eager", one after the
            other; "fused", bias, dropout and sum in one pass, bias and GELU in one; "compiled",
            whatever lies between two products in one pass.
        norm_reads: How often a norm reads its input from memory; with two, its backward reads its
            operands twice for the input's gradient and once for the weight's.
        hides_tensor: Collectives of a backward run beside the product of the weight gradient.
        hides_gradients: Gradients are summed over the replicas beside the backward.
        hides_messages: Pipeline messages travel beside computations; else each one holds its two
            ranks.
        gathers_messages: Without sequence parallelism a message is cut over the tensor group and
            gathered at its other end (arXiv 2104.04473, section 4.1).
        batch_first: Hidden states are (b, s, h), not (s, b, h): collectives over parts of the
            sequence move it to the front.
        folds_experts: Experts are shared out among all ranks of a stage, the tensor-parallel ones
            first (arXiv 2504.14960); else among those of data and context parallelism, and each
            tensor-parallel rank has them.
        groups_products: Products of a layer's experts are one call on a GPU; else one after the
            other.
        shards: What replicas share out besides the optimizer's state: "none"; the parameters of
            "blocks", which are gathered twice a microbatch, over all cards of a node (FSDP2); or
            those of single "modules", which are gathered once more if they are recomputed, by rings
            that cross from node to node over one card (ZeRO-3 of 2021).
        float8: Products of the layers multiply in float8, with one scale for each operand and call.
        slower: Factor by which computations take longer than alone, since collectives beside them
            hold multiprocessors and memory.
        single_loss: The loss takes a copy of the logits in fp32.
        again: What selective recomputation computes again besides all that lies between products: a
            share of the products; None: the attention alone.
        balances_stages: Stages are cut by cost, embedding and head included; else by equal numbers
            of layers.
        operations: Operations that the host launches for a layer's forward; a backward launches
            twice as many.
        collective_operations: Besides, for each collective.
        operation_s: Seconds of the host for each.
        gradient: Bytes of a gradient, as it is accumulated and summed; None: the precision's.
        gradient_copy: Bytes of a copy of it that the optimizer's step makes.
        accumulation: Bytes read and written for each parameter and microbatch to add its gradient
            up, besides the product's own write.
        loss: Bytes read and written for each logit by the loss and its backward.
        optimizer: Bytes read and written for each parameter by a step: gradient norm, unscaling,
            Adam, copy to half precision; None: the gradient twice, weights and state once and back,
            by the precision.
    """

    name: str
    attention: Literal["unfused", "fused", "tuned"]
    skips_masked: bool
    elementwise: Literal["eager", "fused", "compiled"]
    norm_reads: int
    hides_tensor: bool
    hides_gradients: bool
    hides_messages: bool
    gathers_messages: bool
    batch_first: bool = False
    folds_experts: bool = False
    groups_products: bool = True
    shards: Literal["none", "blocks", "modules"] = "none"
    float8: bool = False
    slower: float = 1.0
    single_loss: bool = False
    again: float | None = None
    balances_stages: bool
    operations: int
    collective_operations: int = 4
    operation_s: float
    gradient: int | None = None
    gradient_copy: int = 0
    accumulation: float
    loss: float
    optimizer: float | None = None

    def __post_init__(self) -> None:
        check_types(self)


_OPERATION_S = 10e-6
"""Host time of one operation of eager PyTorch.

A block of a GPT-2 at h = 16 takes 154 us of one core for the 30 aten operations of its forward and
392 us for the 70 of its backward, with almost empty kernels. Launching a kernel on a GPU takes
about as long again. The number is rounded to fit the small steps published with arXiv 2312.12391,
which therefore do not test it. """

_MEGATRON_2021 = Software(
    name="megatron-2021",
    # Megatron-LM v2.3 (the code of arXiv 2104.04473): scores and probabilities in memory, masked
    # softmax in one kernel, bias-GELU and bias-dropout-add by TorchScript, all-reduces and messages
    # waited for, --DDP-impl local: one all-reduce of fp16 gradients at the end.
    attention="unfused",
    skips_masked=False,
    elementwise="fused",
    # apex's mixed-precision LayerNorm: statistics, then values; gradients by cuComputeGradInput and
    # GradGammaBeta
    norm_reads=2,
    hides_tensor=False,
    hides_gradients=False,
    hides_messages=False,
    gathers_messages=True,
    balances_stages=False,
    # Of ParallelTransformerLayer.forward, counted by reading: kernels, views, autograd functions,
    # the random state forked for a dropout.
    operations=70,
    operation_s=_OPERATION_S,
    gradient=2,
    gradient_copy=4,  # Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads
    accumulation=6,  # main_grad += grad, fp16: read 2 + 2, write 2
    # fp16 logits to fp32, maximum, subtraction, exponential, sum, quotient, and the backward's
    # scaling and cast.
    loss=52,
    # Apex: copy to fp32 2 + 4, unscale 8, norm 4, clip 8, FusedAdam 28 (p, m, v both ways,
    # gradient), copy to fp16 6.
    optimizer=60,
)
_MEGATRON_2022 = replace(
    _MEGATRON_2021,
    name="megatron-2022",
    norm_reads=1,  # apex's persistent LayerNorm keeps the row in registers
    # arXiv 2205.05198: all-reduces of a backward run beside the product of the weight gradient,
    # which adds to the fp32 gradient itself.
    hides_tensor=True,
    gradient=4,
    gradient_copy=0,
    accumulation=6,  # the product reads 4 and writes 4 in place of writing 2
)
_MEGATRON_2024 = replace(
    _MEGATRON_2022,
    name="megatron-2024",
    # Megatron-Core 0.9 to 0.12 with Transformer Engine, as in arXiv 2504.14960: cuDNN's attention;
    # SwiGLU and rotation fused; --overlap-grad-reduce, --overlap-param-gather and
    # --overlap-p2p-communication; --expert-tensor-parallel-size 1; experts' products are kernels of
    # their own, in several streams (megatron/core/transformer/moe/README.md, --moe-grouped-gemm).
    attention="tuned",
    skips_masked=True,
    hides_gradients=True,
    hides_messages=True,
    folds_experts=True,
    groups_products=False,
)
_EAGER = Software(
    name="ours",
    attention="fused",
    skips_masked=True,
    elementwise="eager",
    norm_reads=2,  # torch's native layer_norm, as above
    hides_tensor=True,  # tensor_parallel/linear.py
    hides_gradients=True,  # data_parallel/buckets.py
    hides_messages=True,  # pipeline/p2p.py
    gathers_messages=True,
    batch_first=True,  # tensor_parallel/collectives.py
    balances_stages=True,  # pipeline/balance.py
    operations=50,  # aten's: 30 for a GPT-2's block, 64 with dropout, 68 for a Llama's
    operation_s=_OPERATION_S,
    # tests/test_matrix_product.py: 8 bytes an element and microbatch, of which the product writes 2
    accumulation=6,
    loss=30,
)
_COMPILED = replace(
    _EAGER, name="ours-compiled", elementwise="compiled", norm_reads=1, operations=12
)

_FSDP2 = replace(
    _EAGER,
    name="fsdp2",
    # torchtitan of December 2024 (torch's FSDP2, its own Llama): scaled_dot_product_attention,
    # tensor parallelism waited for; of the products of a layer every second is computed again
    # (train_configs/llama3_8b.toml, selective_ac_option = 'op'), and attention is not.
    hides_tensor=False,
    shards="blocks",
    # fitted on one row: Llama 3.1 8B on 32 H200s, float8 (tests/planner/test_published_sharded.py)
    slower=1.2,
    single_loss=True,
    again=0.5,
    balances_stages=False,
)
_FSDP2_COMPILED = replace(
    _FSDP2, name="fsdp2-compiled", elementwise="compiled", norm_reads=1, operations=12
)
_FSDP2_FLOAT8 = replace(_FSDP2_COMPILED, name="fsdp2-fp8", float8=True)
_ZERO3 = replace(
    _MEGATRON_2021,
    name="deepspeed-zero3",
    # DeepSpeed of 2021 with Megatron's layers, as arXiv 2104.04473, section 5.2, ran it. One card a
    # ring and a third gathering were inferred from its table 2, whose times for one and for two
    # samples a GPU are alike.
    shards="modules",
    slower=1.47,  # fitted on one row: 175 B on 384 A100s (tests/planner/test_published_sharded.py)
    hides_gradients=True,
)

SOFTWARE: Mapping[str, Software] = MappingProxyType(
    {
        one.name: one
        for one in (
            _EAGER,
            _COMPILED,
            _MEGATRON_2021,
            _MEGATRON_2022,
            _MEGATRON_2024,
            _FSDP2,
            _FSDP2_COMPILED,
            _FSDP2_FLOAT8,
            _ZERO3,
        )
    }
)
"""The presets."""


def find_software(name: str) -> Software:
    """The preset called ``name``.

    Raises:
        ValueError: There is none; the message names the nearest.
    """
    if name in SOFTWARE:
        return SOFTWARE[name]
    near = difflib.get_close_matches(name, SOFTWARE, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"software={name!r} is unknown: {hint}It is one of {', '.join(SOFTWARE)}")
