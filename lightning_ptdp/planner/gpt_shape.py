"""The shape of our GPT, by formulas.

The operations between the matrix products of a layer read and write the following bytes, counted
operation by operation. r is the bytes per element of the residual stream between blocks, and w
those of the elements that products read and write. h is channels, f inner channels. A dropout mask
has 1 byte per element. "alike" are operations on the whole stream, which sequence parallelism
divides by t::

                   forward                          backward
    2 norms        r + w, or 2 r + w                w + 2 r, or 3 w + 4 r;
                                                    accumulation of the stream's gradient 3 r
    2 sums         w + 2 r (+ mask)                 dropout 2 w + mask; the bias' gradient w
    activation     2 w per inner channel (GELU)     3 w; the bias' gradient w
    attention      copy of its result               concatenation of its gradients, 4 w per channel

If operations are not fused into one pass, each further pass reads and writes once more: a bias 2 w,
a dropout 2 w, autocast's cast r + w.

A layer keeps for its backward the bytes of arXiv 2205.05198 (section 4 and table 2), ``s b h (34 +
5 a s / h)`` in 16 bits with dropout and without tensor parallelism. They consist of the following
parts, in elements, and of the bytes that the attention keeps (``attention_cost.py``). n = b s / c
is tokens, q the width of the queries::

    everywhere alike, 1/t with sequence parallelism     split over t anyway
    2 n h   inputs of the two norms                     n q          output of the attention
    2 n h   their outputs                               2 n f        before and after GELU, or
                                                        3 n f        gate and up, their product
    2 n h   masks of the two dropouts, 1 byte each

On a CPU, a dropout keeps a mask of the activation's dtype.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from lightning_ptdp.models.model_config import GPTConfig, split_widths
from lightning_ptdp.models.size import layer_matrices, norm_parameters, position_parameters
from lightning_ptdp.planner.expert_shape import experts_of
from lightning_ptdp.planner.foreign_sizes import Latent, PlannedGPT
from lightning_ptdp.planner.precision_bytes import Precision
from lightning_ptdp.planner.shapes import (
    MASK,
    AttentionShape,
    Bytes,
    Divided,
    EndShape,
    LayerShape,
    ModelShape,
    Parameters,
    Product,
    is_fused,
)
from lightning_ptdp.planner.software import Software

__all__ = ["gpt_shape"]

_STATISTIC, _ID = 4, 8


@functools.lru_cache(maxsize=64)
def gpt_shape(
    config: GPTConfig,
    *,
    sequence_length: int,
    precision: Precision,
    software: Software,
    on_cpu: bool,
) -> ModelShape:
    """Return the shape of a GPT or a Llama of ours.

    Args:
        config: The model.
        sequence_length: s in tokens.
        precision: Precision of the counted bytes.
        software: Software whose reads and writes are counted.
        on_cpu: Whether the model runs on CPUs.
    """
    s, h, v = sequence_length, config.hidden_size, config.vocabulary_size
    norm, mixtures = norm_parameters(config), config.layers_with_experts
    dense, mixture = (
        _layer(config, s, precision, software, on_cpu=on_cpu, mixture=kind)
        for kind in (False, True)
    )
    stream, table = s * h * precision.residual, (v, h)
    mask = (precision.residual if on_cpu else MASK) if config.dropout else 0
    first = EndShape(
        forward=Bytes(whole=2 * stream),
        backward=Bytes(whole=4 * stream),
        kept=Bytes(whole=s * _ID, alike=s * h * mask),
        parameters=Parameters(whole=position_parameters(config)),
        table=table,
        cost=(v * h + position_parameters(config)) / 8,
    )
    head = EndShape(
        products=(Product(rows=s, outputs=v, inputs=h, cut="outputs", enters=True),),
        kept=Bytes(alike=s * h * (precision.residual + precision.compute)),
        parameters=Parameters(whole=norm),
        table=table,
        cost=v * h,
    )
    return ModelShape(
        runs=tuple(
            (count, layer)
            for count, layer in ((config.num_layers - mixtures, dense), (mixtures, mixture))
            if count
        ),
        input=first,
        head=head,
        tied=config.tie_embeddings,
        sequence_length=s,
        divided=(
            Divided(name="num_heads", size=config.num_heads),
            Divided(name="num_kv_heads", size=config.kv_heads, copied=True),
            *(Divided(name=name, size=size) for name, size in split_widths(config).items()),
        ),
    )


def _layer(
    config: GPTConfig,
    s: int,
    precision: Precision,
    software: Software,
    *,
    on_cpu: bool,
    mixture: bool,
) -> LayerShape:
    h, norm, bias, part = (
        config.hidden_size,
        norm_parameters(config),
        config.bias,
        _attention(config, s),
    )
    _, _, (up, _), (_, f) = layer_matrices(config, mixture=mixture)
    products = [*part.products]
    if f:
        products += [
            Product(
                rows=s, outputs=up, inputs=h, cut="outputs", enters=True, bias=bias, whole=mixture
            ),
            Product(rows=s, outputs=h, inputs=f, cut="inputs", bias=bias, whole=mixture),
        ]
    fused = is_fused(part.attention, software=software, on_cpu=on_cpu)
    forward, backward = _traffic(config, part, s, precision, software, fused=fused, mixture=mixture)
    experts = experts_of(config) if mixture else None
    router = 0 if experts is None else experts.number * h
    return LayerShape(
        products=tuple(products),
        attentions=(part.attention,),
        forward=forward,
        backward=backward,
        kept=_kept(config, part, s, precision, on_cpu=on_cpu, mixture=mixture),
        crossing=s * h * precision.residual,
        parameters=Parameters(
            whole=part.parameters.whole + 2 * norm + router + (h * bias if f else 0),
            split=part.parameters.split + up * (h + bias) + h * f,
            copied=part.parameters.copied,
            heads=part.parameters.heads,
        ),
        cost=sum(product.elements() for product in products)
        + (0 if experts is None else router + experts.chosen * experts.parameters),
        gated=config.mlp == "swiglu",
        experts=experts,
    )


@dataclass(frozen=True, kw_only=True)
class _ShapePart:
    """A layer's attention, with widths in channels.

    Attributes:
        products: Products around the scores.
        attention: The scores.
        parameters: Parameters, including norms and biases.
        made: Width of queries, keys and values.
        turned: Part of ``made`` with rotary position.
        results: Width of the weighted values.
        narrow: Width of the normed representations from which queries, keys and values are
            computed, in addition to the residual stream.
        table: Width of the table of cosines and sines.
    """

    products: tuple[Product, ...]
    attention: AttentionShape
    parameters: Parameters
    made: int
    turned: float
    results: int
    narrow: int = 0
    table: int


def _attention(config: GPTConfig, s: int) -> _ShapePart:
    if isinstance(config, PlannedGPT) and config.latent is not None:
        return _latent(config, config.latent, s)
    h, bias, ((qkv, _), (_, q), *_) = config.hidden_size, config.bias, layer_matrices(config)
    keys = qkv - q
    return _ShapePart(
        products=(
            Product(
                rows=s,
                outputs=qkv,
                inputs=h,
                cut="outputs",
                enters=True,
                copied=keys,
                least=2 * config.head_dim,
                bias=bias,
            ),
            Product(rows=s, outputs=h, inputs=q, cut="inputs", bias=bias),
        ),
        attention=_scores(config, s, config.kv_heads, config.head_dim, config.head_dim),
        parameters=Parameters(
            whole=h * bias,
            split=q * (h + bias) + h * q,
            copied=keys * (h + bias),
            heads=config.kv_heads,
        ),
        made=qkv,
        turned=q + keys / 2,
        results=q,
        table=config.head_dim,
    )


def _latent(config: GPTConfig, latent: Latent, s: int) -> _ShapePart:
    h, a, width = config.hidden_size, config.num_heads, latent.plain + latent.turned
    results, key_values = a * latent.values, a * (latent.plain + latent.values)
    queries = [
        Product(rows=s, outputs=a * width, inputs=latent.queries or h, cut="outputs", enters=True)
    ]
    if latent.queries:
        queries.insert(0, Product(rows=s, outputs=latent.queries, inputs=h))
    products = (
        *queries,
        Product(rows=s, outputs=latent.keys + latent.turned, inputs=h),
        Product(rows=s, outputs=key_values, inputs=latent.keys, cut="outputs", enters=True),
        Product(rows=s, outputs=h, inputs=results, cut="inputs"),
    )
    narrow = (latent.queries or 0) + latent.keys
    return _ShapePart(
        products=products,
        attention=_scores(config, s, a, width, latent.values),
        parameters=Parameters(
            whole=narrow + sum(product.elements() for product in products if product.cut == "none"),
            split=sum(product.elements() for product in products if product.cut != "none"),
        ),
        made=a * (2 * width + latent.values),
        turned=(a + 1) * latent.turned,
        results=results,
        narrow=narrow,
        table=latent.turned,
    )


def _scores(
    config: GPTConfig, s: int, kv_heads: int, head_dim: int, value_dim: int
) -> AttentionShape:
    return AttentionShape(
        queries=s,
        keys=s,
        heads=config.num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        causal=True,
        dropout=config.dropout > 0,
    )


def _kept(
    config: GPTConfig,
    part: _ShapePart,
    s: int,
    precision: Precision,
    *,
    on_cpu: bool,
    mixture: bool,
) -> Bytes:
    *_, (_, f) = layer_matrices(config, mixture=mixture)
    h, w = config.hidden_size, precision.compute
    statistics = _STATISTIC * (1 if config.norm == "rms" else 2)
    norm = h * precision.residual + statistics + h * w
    masks = 2 * h * (w if on_cpu else MASK) if config.dropout else 0
    inner = 2 * f if config.mlp == "gelu" else 3 * f
    # Cosines and sines of half the channels at each position.
    tables = s * part.table * w if config.position == "rope" else 0.0
    return Bytes(
        alike=s * (2 * norm + masks + part.narrow * 2 * w),
        split=s * (part.results + inner) * w,
        once=tables,
    )


def _traffic(
    config: GPTConfig,
    part: _ShapePart,
    s: int,
    precision: Precision,
    software: Software,
    *,
    fused: bool,
    mixture: bool,
) -> tuple[Bytes, Bytes]:
    how, r, w = software.elementwise, precision.residual, precision.compute
    *_, (_, f) = layer_matrices(config, mixture=mixture)
    qkv, q = part.made, part.results
    eager, gated = how == "eager", config.mlp == "swiglu"
    mask = MASK if config.dropout else 0

    reads = software.norm_reads
    norm = reads * r + w + (2 * r if eager and precision.casts else 0)
    total = w + 2 * r + mask
    if eager:
        total += 2 * w if config.dropout else 0
    back = (
        (2 * reads - 1) * (w + r)
        + r
        + (0 if how == "compiled" else 3 * r)
        + (2 * w + mask if config.dropout else 0)
        + (w if config.bias else 0)
    )
    active = (5 if eager else 3) * w if gated else 2 * w
    active_back = (9 if eager else 5) * w if gated else 3 * w
    split = float(f * active)
    split_back = float(
        f * (active_back + (w if config.bias else 0)) + qkv * (2 if fused else 4) * w
    )
    if not fused:
        split += 2 * w * q
        split_back += 2 * w * q
    if config.position == "rope":
        split += part.turned * w * (8 if eager else 2)
        split_back += part.turned * w * (8 if eager else 2)
    h = config.hidden_size
    alike, alike_back = (
        2 * h * (norm + total) + part.narrow * norm,
        2 * h * back + part.narrow * ((2 * reads - 1) * 2 * w),
    )
    return Bytes(alike=s * alike, split=s * split), Bytes(
        alike=s * alike_back, split=s * split_back
    )
