"""Bytes that a transformer layer keeps for its backward, for one microbatch on one rank.

The formulas of arXiv 2205.05198 (section 4 and table 2), ``s b h (34 + 5 a s / h)`` in 16 bits with dropout and without tensor parallelism,
by what makes them up; fused attention keeps a log-sum-exp a query and head instead of the s x s scores: 4 a / h for 5 a s / h. What is
kept, n = b s / c tokens, f inner channels, q and k the widths of the queries and of the keys, in elements::

    everywhere alike, 1/t with sequence parallelism     split over t anyway
    2 n h   inputs of the two norms                     n (q + 2 k)  queries, keys and values
    2 n h   their outputs                               n q          output of the attention, and n a fp32 log-sum-exps
    2 n h   masks of the two dropouts, 1 byte each      2 n f        before and after GELU, or 3 n f: gate and up, their product
                                                        n a s        unfused: probabilities, the dropout's mask (1 byte) and result

On a CPU a dropout keeps a mask of the activation's dtype, and attention with dropout is torch's composition of operations: it keeps its
probabilities, mask and result, and copies of queries, keys (for each query head) and values, all in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ptdp.models.size import layer_matrices
from lightning_ptdp.planner.expert_shape import experts_of
from lightning_ptdp.planner.experts import expert_kept, local_experts
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.parameters import matrix_elements

__all__ = ["LayerActivations", "layer_activations", "logits_bytes"]

_LOG_SUM_EXP, _STATISTIC, _SINGLE, _MASK = 4, 4, 4, 1


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """One layer and one microbatch.

    Attributes:
        kept: Bytes kept from the forward to the backward, under the chosen recomputation.
        recomputed: Bytes that exist besides while the layer's backward runs, because they are computed again, or fetched.
        cast_weights: Bytes of weights in the computing precision that autocast keeps from the forward to the backward. Only without
            tensor parallelism: our sharded layers cast again.
    """

    kept: float
    recomputed: float
    cast_weights: float

    @property
    def held(self) -> float:
        """Everything held from the forward to the backward."""
        return self.kept + self.cast_weights


def layer_activations(job: Job, choice: Choice, *, mixture: bool = False) -> LayerActivations:
    """What one layer keeps of one microbatch.

    Args:
        job: Model and precision.
        choice: Layout, microbatch and recomputation.
        mixture: It is one of experts.
    """
    everything, experts = _everything(job, choice, mixture=mixture), experts_of(job.model) if mixture else None
    cast = 0.0
    if job.precision.casts and choice.layout.tensor_parallel_size == 1:
        cast = matrix_elements(job.model, 1, mixture=mixture) * job.precision.compute
    if experts is not None:
        everything += expert_kept(experts, job, choice)
        if job.precision.casts:
            cast += local_experts(experts, choice) * experts.parameters * job.precision.compute
    if choice.recompute == "full":
        return LayerActivations(kept=_block_input(job, choice), recomputed=everything + cast, cast_weights=0.0)
    if choice.recompute == "offload":
        # What stays of each block is small; the block that runs and the one beside it are whole.
        return LayerActivations(kept=0.0, recomputed=2 * everything, cast_weights=cast)
    if choice.recompute == "selective":
        # The core's inputs are kept to run it again, its output by the projection behind it.
        (qkv, _), *_ = layer_matrices(job.model, choice.layout.tensor_parallel_size)
        inside = choice.tokens(job) * (_core(job, choice) - qkv * job.precision.compute)
        return LayerActivations(kept=everything - inside, recomputed=inside, cast_weights=cast)
    return LayerActivations(kept=everything, recomputed=0.0, cast_weights=cast)


def logits_bytes(job: Job, choice: Choice) -> tuple[float, float]:
    """What the last stage holds for its norm, head and loss of one microbatch: (kept for the backward, on top of it while that starts).

    The loss keeps its logits, or their log-softmax, in their own precision; autocast has it computed, and kept, in fp32. With a split
    vocabulary the gradient is made in fp32 and then cast. (arXiv 2205.05198, section 4.3, counts 4 s b V / t.)
    """
    t, width = choice.layout.tensor_parallel_size, job.precision.compute
    tokens = choice.tokens(job)
    logits = tokens * -(-job.model.vocabulary_size // t)
    norm = tokens * job.model.hidden_size * (job.precision.residual + width) / (t if choice.layout.sequence_parallel else 1)
    kept = 4 if job.precision.casts and t == 1 else width
    made = 4 if t > 1 else kept
    return logits * kept + norm, logits * (made + (width if made != width else 0))


def _everything(job: Job, choice: Choice, *, mixture: bool) -> float:
    model, precision, t = job.model, job.precision, choice.layout.tensor_parallel_size
    tokens, h = choice.tokens(job), model.hidden_size
    _, (_, q), _, (_, f) = layer_matrices(model, t, mixture=mixture)

    statistics = _STATISTIC * (1 if model.norm == "rms" else 2)
    norm = h * precision.residual + statistics + h * precision.compute
    masks = 2 * h * (precision.compute if job.device.kind == "cpu" else _MASK) if model.dropout else 0
    alike = (2 * norm + masks) / (t if choice.layout.sequence_parallel else 1)

    inner = 2 * f if model.mlp == "gelu" else 3 * f
    split = _core(job, choice) + (q + inner) * precision.compute
    return tokens * (alike + split) + _rotary_tables(job, choice)


def _core(job: Job, choice: Choice) -> float:
    """Bytes a token that the attention itself keeps, its inputs among them."""
    model, w, t = job.model, job.precision.compute, choice.layout.tensor_parallel_size
    (qkv, _), (_, q), *_ = layer_matrices(model, t)
    heads = model.num_heads // t
    if job.fuses_attention:
        return qkv * w + heads * _LOG_SUM_EXP
    if job.device.kind == "cpu":
        return 3 * q * _SINGLE + heads * job.sequence_length * 3 * _SINGLE
    return qkv * w + heads * job.sequence_length * (w + (w + _MASK if model.dropout else 0))


def _rotary_tables(job: Job, choice: Choice) -> float:
    """Cosines and sines of half the channels at each position."""
    if job.model.position != "rope":
        return 0.0
    return job.sequence_length / choice.layout.context_parallel_size * job.model.head_dim * job.precision.compute


def _block_input(job: Job, choice: Choice) -> float:
    split = choice.layout.sequence_parallel or choice.distribute_saved_activations
    whole = choice.tokens(job) * job.model.hidden_size * job.precision.residual
    return whole / (choice.layout.tensor_parallel_size if split else 1)
