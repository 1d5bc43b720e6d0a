"""Bytes that a layer's operations between its matrix products read and write, for one microbatch on one rank.

Counted operation by operation, r bytes an element of the stream between blocks and w of what products read and write, h channels, f inner
channels, 1 byte an element of a dropout's mask. "alike" are operations on the whole stream, which sequence parallelism divides by t::

    forward                                         backward
    2 norms        r + w, or 2 r + w                w + 2 r, or 3 w + 4 r; the stream's gradient added up, 3 r
    2 sums         w + 2 r (+ mask)                 dropout 2 w + mask; the bias' gradient w
    activation     2 w an inner channel (GELU)      3 w; the bias' gradient w
    attention's    its result laid out              its gradients put together, 4 w a channel

What is not fused into one pass is read and written once more for each further pass: a bias 2 w, a dropout 2 w, autocast's cast r + w.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ptdp.models.size import layer_matrices
from lightning_ptdp.planner.job import Choice, Job

__all__ = ["Traffic", "attention_traffic", "layer_traffic"]

_MASK = 1


@dataclass(frozen=True)
class Traffic:
    """Bytes of a forward and of its backward."""

    forward: float
    backward: float


def layer_traffic(job: Job, choice: Choice, *, mixture: bool = False) -> Traffic:
    """Of one layer, but for the core of its attention, and experts that are chosen from."""
    model, layout, how = job.model, choice.layout, job.software.elementwise
    t, r, w = layout.tensor_parallel_size, job.precision.residual, job.precision.compute
    (qkv, _), (_, q), _, (_, f) = layer_matrices(model, t, mixture=mixture)
    eager, gated = how == "eager", model.mlp == "swiglu"
    mask = _MASK if model.dropout else 0
    biased = model.bias

    reads = job.software.norm_reads
    norm = reads * r + w + (2 * r if eager and job.precision.casts else 0)
    total = w + 2 * r + mask
    if eager:
        total += 2 * w if model.dropout else 0
        total += 2 * w if biased and t > 1 else 0  # behind the sum over ranks; else the product adds it
    back = (
        (2 * reads - 1) * (w + r)
        + r
        + (0 if how == "compiled" else 3 * r)
        + (2 * w + mask if model.dropout else 0)
        + (w if biased else 0)
    )
    alike = model.hidden_size / (t if layout.sequence_parallel else 1)

    active = (5 if eager else 3) * w if gated else 2 * w
    active_back = (9 if eager else 5) * w if gated else 3 * w
    split = float(f * active)
    split_back = float(f * (active_back + (w if biased else 0)) + qkv * (2 if job.fuses_attention else 4) * w)
    if not job.fuses_attention:
        split += 2 * w * q
        split_back += 2 * w * q
    if model.position == "rope":
        turned = qkv - (qkv - q) / 2  # queries and keys
        split += turned * w * (8 if eager else 2)
        split_back += turned * w * (8 if eager else 2)
    tokens = choice.tokens(job)
    return Traffic(forward=tokens * (2 * alike * (norm + total) + split), backward=tokens * (2 * alike * back + split_back))


def attention_traffic(job: Job, choice: Choice) -> Traffic:
    """Of the s x s scores between the products of an attention that is not fused: masked softmax, dropout."""
    w, heads = job.precision.compute, job.model.num_heads // choice.layout.tensor_parallel_size
    scores = choice.tokens(job) * job.sequence_length * heads
    dropped = 2 * w + _MASK if job.model.dropout else 0
    return Traffic(forward=scores * (2 * w + dropped), backward=scores * (3 * w + dropped))
