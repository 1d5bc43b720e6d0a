"""Published training programs, with which the planner's estimates are compared.

The source of each number is named next to it.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_ptdp.planner import SOFTWARE, Software

MEGATRON_2021 = Software(
    name="megatron-2021",
    # Megatron-LM v2.3 (the code of arXiv 2104.04473): scores and probabilities in memory, masked
    # softmax in one kernel, bias-GELU and bias-dropout-add by TorchScript, blocking all-reduces and
    # messages, --DDP-impl local: one all-reduce of fp16 gradients at the end.
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
    # Counted in ParallelTransformerLayer.forward: kernels, views, autograd functions, the random
    # state forked for a dropout.
    operations=70,
    operation_s=SOFTWARE["ours"].operation_s,
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
MEGATRON_2022 = replace(
    MEGATRON_2021,
    name="megatron-2022",
    norm_reads=1,  # apex's persistent LayerNorm keeps the row in registers
    # arXiv 2205.05198: all-reduces of a backward run beside the product of the weight gradient,
    # which adds to the fp32 gradient itself.
    hides_tensor=True,
    gradient=4,
    gradient_copy=0,
    accumulation=6,  # the product reads 4 and writes 4 instead of writing 2
)
MEGATRON_2024 = replace(
    MEGATRON_2022,
    name="megatron-2024",
    # Megatron-Core 0.9 to 0.12 with Transformer Engine, as in arXiv 2504.14960: cuDNN's attention;
    # SwiGLU and rotation fused; --overlap-grad-reduce, --overlap-param-gather and
    # --overlap-p2p-communication; --expert-tensor-parallel-size 1; separate kernels for the
    # experts' products, in several streams (megatron/core/transformer/moe/README.md,
    # --moe-grouped-gemm).
    attention="tuned",
    skips_masked=True,
    hides_gradients=True,
    hides_messages=True,
    folds_experts=True,
    groups_products=False,
)
FSDP2 = replace(
    SOFTWARE["ours"],
    name="fsdp2",
    # torchtitan of December 2024 (torch's FSDP2, its own Llama): scaled_dot_product_attention,
    # blocking tensor-parallel collectives. Every second product of a layer is recomputed
    # (train_configs/llama3_8b.toml, selective_ac_option = 'op'), and attention is not.
    hides_tensor=False,
    shards="blocks",
    # fitted to one row: Llama 3.1 8B on 32 H200s, float8 (test_published_sharded.py)
    slower=1.2,
    single_loss=True,
    again=0.5,
    balances_stages=False,
)
FSDP2_COMPILED = replace(
    FSDP2, name="fsdp2-compiled", elementwise="compiled", norm_reads=1, operations=12
)
FSDP2_FLOAT8 = replace(FSDP2_COMPILED, name="fsdp2-fp8", float8=True)
ZERO3 = replace(
    MEGATRON_2021,
    name="deepspeed-zero3",
    # DeepSpeed of 2021 with Megatron's layers, as in arXiv 2104.04473, section 5.2. One card per
    # ring and a third gathering were inferred from its table 2, where one and two samples per GPU
    # take equally long.
    shards="modules",
    slower=1.47,  # fitted to one row: 175 B on 384 A100s (test_published_sharded.py)
    hides_gradients=True,
)

PROGRAMS = {
    program.name: program
    for program in (
        *SOFTWARE.values(),
        MEGATRON_2021,
        MEGATRON_2022,
        MEGATRON_2024,
        FSDP2,
        FSDP2_COMPILED,
        FSDP2_FLOAT8,
        ZERO3,
    )
}
