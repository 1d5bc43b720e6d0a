"""Figures of training software and of its precisions, with presets by name.

The figures describe kernels, overlaps, bytes and host time. The same layout on the same devices
takes twice as long if attention writes its scores to memory, or if the host launches kernels more
slowly than small kernels run. The source of each number is named next to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from lightning_ptdp.base.errors import did_you_mean
from lightning_ptdp.base.option_types import check_types


@dataclass(frozen=True, kw_only=True)
class Software:
    """A training program.

    Attributes:
        name: Name in tables.
        attention: "unfused" writes the s x s scores to memory and keeps them, "fused" does not,
            and skips what the causal mask hides; "tuned" is fused, too, by a kernel for the
            device's own instructions.
        elementwise: How operations between products use memory: "eager", one after the other;
            "fused", bias, dropout and sum in one pass, bias and GELU in one; "compiled", all
            operations between two products in one pass.
        norm_reads: Number of times that a norm reads its input from memory; if it is two, the
            norm's backward reads its operands twice for the input's gradient and once for the
            weight's.
        hides_tensor: Whether collectives of a backward overlap with the product of the weight
            gradient.
        hides_gradients: Whether gradients are summed over the replicas during the backward.
        hides_messages: Whether pipeline messages travel during computations; otherwise each message
            blocks its two ranks.
        batch_first: Whether hidden states are (b, s, h), not (s, b, h), so that collectives over
            parts of the sequence move it to the front.
        folds_experts: Whether experts are distributed over all ranks of a stage, the
            tensor-parallel ones first (arXiv 2504.14960); otherwise over the data- and
            context-parallel ranks, and each tensor-parallel rank has them.
        groups_products: Whether the products of a layer's experts are one call on a GPU; otherwise
            they run one after the other.
        shards: State that is sharded over the replicas in addition to the optimizer's: "none"; the
            parameters by "blocks", gathered twice per microbatch over all cards of a node (FSDP2);
            or the parameters by single "modules", gathered once more if they are recomputed, by
            rings that cross from node to node over one card (ZeRO-3 of 2021).
        float8: Whether products of the layers multiply in float8, with one scale per operand and
            call.
        slower: Factor by which computations take longer than alone, because concurrent collectives
            occupy multiprocessors and memory.
        single_loss: Whether the loss makes a copy of the logits in fp32.
        again: Fraction of the products that selective recomputation repeats, in addition to all
            operations between products. None means that it repeats only the attention.
        balances_stages: Whether stages are cut by cost, including embedding and head; otherwise by
            equal numbers of layers.
        operations: Operations that the host launches for a layer's forward; a backward launches
            twice as many.
        operation_s: Seconds of the host per operation.
        gradient: Bytes of a gradient, as it is accumulated and summed; None means the precision's.
        gradient_copy: Bytes of a copy of the gradient that the optimizer's step makes.
        accumulation: Bytes read and written per parameter and microbatch to accumulate its
            gradient, in addition to the product's own write.
        loss: Bytes read and written per logit by the loss and its backward.
        optimizer: Bytes read and written per parameter by a step: gradient norm, unscaling, Adam,
            copy to half precision; None means the gradient twice, weights and state once in each
            direction, by the precision.
    """

    name: str
    attention: Literal["unfused", "fused", "tuned"]
    elementwise: Literal["eager", "fused", "compiled"]
    norm_reads: int
    hides_tensor: bool
    hides_gradients: bool
    hides_messages: bool
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
which therefore do not test it.
"""

_MEGATRON_2021 = Software(
    name="megatron-2021",
    # Megatron-LM v2.3 (the code of arXiv 2104.04473): scores and probabilities in memory, masked
    # softmax in one kernel, bias-GELU and bias-dropout-add by TorchScript, blocking all-reduces and
    # messages, --DDP-impl local: one all-reduce of fp16 gradients at the end.
    attention="unfused",
    elementwise="fused",
    # apex's mixed-precision LayerNorm: statistics, then values; gradients by cuComputeGradInput and
    # GradGammaBeta
    norm_reads=2,
    hides_tensor=False,
    hides_gradients=False,
    hides_messages=False,
    balances_stages=False,
    # Counted in ParallelTransformerLayer.forward: kernels, views, autograd functions, the random
    # state forked for a dropout.
    operations=70,
    operation_s=_OPERATION_S,
    gradient=2,
    gradient_copy=4,  # Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads
    accumulation=6,  # main_grad += grad, fp16: read 2 + 2, write 2
    # fp16 logits to fp32, maximum, subtraction, exponential, sum, quotient, and the backward's
    # scaling and cast.
    loss=52,
    # Apex: copy to fp32 2 + 4, unscale 8, norm 4, clip 8, FusedAdam 28 (p, m, v read and written,
    # gradient), copy to fp16 6.
    optimizer=60,
)
_MEGATRON_2022 = replace(
    _MEGATRON_2021,
    name="megatron-2022",
    norm_reads=1,  # apex's persistent LayerNorm keeps the row in registers
    # arXiv 2205.05198: all-reduces of a backward overlap with the product of the weight gradient,
    # which adds to the fp32 gradient itself.
    hides_tensor=True,
    gradient=4,
    gradient_copy=0,
    accumulation=6,  # the product reads 4 and writes 4 instead of writing 2
)
_MEGATRON_2024 = replace(
    _MEGATRON_2022,
    name="megatron-2024",
    # Megatron-Core 0.9 to 0.12 with Transformer Engine, as in arXiv 2504.14960: cuDNN's attention;
    # SwiGLU and rotation fused; --overlap-grad-reduce, --overlap-param-gather and
    # --overlap-p2p-communication; --expert-tensor-parallel-size 1; separate kernels for the
    # experts' products, in several streams (megatron/core/transformer/moe/README.md,
    # --moe-grouped-gemm).
    attention="tuned",
    hides_gradients=True,
    hides_messages=True,
    folds_experts=True,
    groups_products=False,
)
_EAGER = Software(
    name="ours",
    attention="fused",
    elementwise="eager",
    norm_reads=2,  # torch's native layer_norm, as above
    hides_tensor=True,  # tensor_parallel/parallel_product.py
    hides_gradients=True,  # data_parallel/buckets.py
    hides_messages=True,  # pipeline/p2p.py
    batch_first=True,  # tensor_parallel/collectives.py
    balances_stages=True,  # pipeline/containers.py
    operations=50,  # aten's: 30 for a GPT-2's block, 64 with dropout, 68 for a Llama's
    operation_s=_OPERATION_S,
    # tests/test_matrix_product.py: 8 bytes per element and microbatch, of which the product writes
    # 2
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
    # blocking tensor-parallel collectives. Every second product of a layer is recomputed
    # (train_configs/llama3_8b.toml, selective_ac_option = 'op'), and attention is not.
    hides_tensor=False,
    shards="blocks",
    # fitted to one row: Llama 3.1 8B on 32 H200s, float8 (tests/planner/test_published_sharded.py)
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
    # DeepSpeed of 2021 with Megatron's layers, as in arXiv 2104.04473, section 5.2. One card per
    # ring and a third gathering were inferred from its table 2, where one and two samples per GPU
    # take equally long.
    shards="modules",
    slower=1.47,  # fitted to one row: 175 B on 384 A100s (tests/planner/test_published_sharded.py)
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
"""The presets by name."""


def find_software(name: str) -> Software:
    """Return the preset called ``name``.

    Raises:
        ValueError: There is no such preset. The message names the nearest one.
    """
    if name in SOFTWARE:
        return SOFTWARE[name]
    hint = did_you_mean(name, SOFTWARE)
    raise ValueError(f"software={name!r} is unknown. {hint}It must be one of {', '.join(SOFTWARE)}")


# ---- Bytes per element under Lightning's precisions ----------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per element under one of Lightning's precisions.

    Attributes:
        name: Lightning's ``precision``.
        weight: Bytes of a parameter, and of the residual stream between blocks, which autocast does
            not cast.
        compute: Bytes of the operands and results of matrix products.
        gradient: Bytes of an accumulated gradient.
        state: Bytes of the optimizer's state: two moments of Adam, and a master copy of a parameter
            in half precision.
    """

    name: str
    weight: int
    compute: int
    gradient: int = 4
    state: int

    @property
    def casts(self) -> bool:
        """Return True if parameters are cast for each use (autocast)."""
        return self.weight != self.compute


_SINGLE = {"weight": 4, "compute": 4, "state": 8}
_MIXED = {"weight": 4, "compute": 2, "state": 8}
_HALF = {"weight": 2, "compute": 2, "state": 12}
_BYTES = {
    "32-true": _SINGLE,
    "bf16-mixed": _MIXED,
    "bf16-true": _HALF,
    "16-mixed": _MIXED,
    "16-true": _HALF,
}
PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {name: Precision(name=name, **sizes) for name, sizes in _BYTES.items()}
)
"""Precisions by Lightning's names.

Half precision throughout takes 18 bytes per parameter, or 6 + 12/d with a sharded optimizer. The
other precisions take 16, or 8 + 8/d.
"""


def find_precision(name: str, *, states: str = "float32") -> Precision:
    """Return the precision called ``name``.

    Args:
        name: Lightning's name; ``"32"`` and ``"bf16"`` have the same meaning as in Lightning.
        states: Type of Adam's moments (``AdamWConfig.states``).

    Raises:
        ValueError: There is no such precision. The message names the nearest one.
    """
    full = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}.get(str(name), str(name))
    if full not in PRECISIONS:
        raise ValueError(
            f"precision={name!r} is unknown to the planner. {did_you_mean(full, PRECISIONS)}It supports "
            f"{', '.join(PRECISIONS)}"
        )
    found = PRECISIONS[full]
    return replace(found, state=found.state - 4) if states == "bfloat16" else found
