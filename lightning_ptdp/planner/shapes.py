"""Shape of a model for the planner: the matrix products, attention and bytes of its layers and
ends, for one sample, and how t divides them.

Time, memory and search read nothing else. A ``GPTConfig`` gives it by formulas (``gpt_shape.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_ptdp.planner.expert_shape import ExpertShape
from lightning_ptdp.planner.software import Software

__all__ = [
    "MASK",
    "Attention",
    "Bytes",
    "Divided",
    "EndShape",
    "LayerShape",
    "ModelShape",
    "Parameters",
    "Product",
    "is_fused",
]

MASK = 1
"""Bytes an element of a dropout's mask, on an accelerator."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of the forward, (rows, inputs) x (inputs, outputs); its backward has one of the
    same size for each operand.

    Attributes:
        rows: Of a sample: its tokens, in most layers.
        outputs: Columns of the result.
        inputs: Terms of each sum.
        cut: What t divides: "outputs" (a column layer), "inputs" (a row layer, whose results are
            summed over the ranks), "rows" (of heads, where two activations are multiplied) or
            nothing.
        enters: Whether it is the first of the column layers that read one tensor, whose gradient is
            summed over the ranks.
        copied: Of the outputs, the channels of key and value heads, of which a rank has ``least``
            at least.
        least: Outputs that are not divided further.
        bias: Whether one is added.
        whole: Whether it sees the whole sequence in spite of sequence parallelism, as in a mixture
            of experts.
        weighted: Whether its second operand is a parameter.
    """

    rows: int
    outputs: int
    inputs: int
    cut: Literal["outputs", "inputs", "rows", "none"] = "none"
    enters: bool = False
    copied: int = 0
    least: int = 0
    bias: bool = False
    whole: bool = False
    weighted: bool = True

    def local(self, t: int) -> tuple[int, int]:
        """(outputs, inputs) on one of t ranks; outputs that t does not divide, such as a
        vocabulary, are padded."""
        if self.cut == "outputs":
            return -(-(self.outputs - self.copied) // t) + max(
                self.least, self.copied // t
            ), self.inputs
        return self.outputs, self.inputs // t if self.cut == "inputs" else self.inputs

    def elements(self, t: int = 1) -> int:
        """Elements of the matrix on one of t ranks; 0 if it is no parameter."""
        if not self.weighted:
            return 0
        outputs, inputs = self.local(t)
        return outputs * inputs

    @property
    def flops(self) -> int:
        """Operations of a sample's forward, a multiply-add being two."""
        return 2 * self.rows * self.outputs * self.inputs


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Scores and weighted values of one attention; t divides the heads.

    Attributes:
        queries: Positions of a sample that look.
        keys: Positions that are looked at.
        heads: Number of heads.
        kv_heads: Heads of keys and values; a rank has one at least.
        head_dim: Channels of a head's queries and keys.
        value_dim: Channels of a head's values.
        causal: Whether half of the scores are masked.
        dropout: Whether weights are dropped.
    """

    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool
    dropout: bool

    def local_heads(self, t: int) -> tuple[int, int]:
        """Heads of queries, and of keys, on one of t ranks."""
        return self.heads // t, max(1, self.kv_heads // t)

    @property
    def flops(self) -> int:
        """Operations of a sample's forward, over all pairs of positions."""
        return 2 * self.queries * self.keys * self.heads * (self.head_dim + self.value_dim)


def is_fused(attention: Attention, *, software: Software, on_cpu: bool) -> bool:
    """Return True if no scores are in memory; torch's kernel for CPUs takes no dropout."""
    return software.attention != "unfused" and not (on_cpu and attention.dropout)


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of a sample, by what divides them besides c.

    Attributes:
        alike: Every rank of a tensor group has them, unless it has 1/t of the sequence.
        split: t divides them.
        whole: Nothing divides them.
        once: Of a microbatch, however many samples it has; nothing divides them.
    """

    alike: float = 0.0
    split: float = 0.0
    whole: float = 0.0
    once: float = 0.0

    def on(self, *, samples: float, t: int, sequence_parallel: bool, c: int = 1) -> float:
        """On one rank, for so many samples."""
        return (
            samples * (self.alike / (t if sequence_parallel else 1) + self.split / t + self.whole)
            + self.once
        ) / c


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters.

    Attributes:
        whole: That every rank has.
        split: That t divides.
        copied: Of key and value heads.
        heads: How many of those there are; a rank has one at least.
    """

    whole: int = 0
    split: int = 0
    copied: int = 0
    heads: int = 1

    def on(self, t: int) -> int:
        """On one of t ranks."""
        return self.whole + self.split // t + self.copied * max(1, self.heads // t) // self.heads


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One layer; bytes are in the precision and for the software for which it was made.

    Attributes:
        products: In the order of the forward.
        attentions: Likewise.
        forward: What the operations between products read and write; scores in memory are not among
            it.
        backward: Likewise, of the backward.
        kept: What is kept for the backward, but for what the attentions keep, their inputs among
            it.
        crossing: Bytes of a sample that come from the layer before.
        parameters: Numbers of its parameters.
        cost: Multiply-adds a token, as the pipeline's partition counts them
            (``pipeline/balance.py``).
        gated: Whether its feed-forward part has a gate, as SwiGLU's.
        experts: Those that its router chooses from; its products, bytes and parameters are without
            them.
    """

    products: tuple[Product, ...]
    attentions: tuple[Attention, ...] = ()
    forward: Bytes = field(default_factory=Bytes)
    backward: Bytes = field(default_factory=Bytes)
    kept: Bytes = field(default_factory=Bytes)
    crossing: float
    parameters: Parameters
    cost: float = 0.0
    gated: bool = False
    experts: ExpertShape | None = None

    def elements(self, t: int = 1) -> int:
        """Elements of its matrices on one of t ranks."""
        return sum(product.elements(t) for product in self.products)

    @property
    def flops(self) -> int:
        """Operations of a sample's forward."""
        activations = sum(product.flops for product in self.products if not product.weighted)
        return (
            self.weighted_flops
            + activations
            + sum(attention.flops for attention in self.attentions)
        )

    @property
    def weighted_flops(self) -> int:
        """Those of products with a parameter."""
        experts = 0
        if self.experts is not None:
            experts = self.products[0].rows * (
                2 * self.experts.number * self.experts.hidden + self.experts.flops
            )
        return sum(product.flops for product in self.products if product.weighted) + experts


@dataclass(frozen=True, kw_only=True)
class EndShape:
    """Work before the layers, or after them.

    Attributes:
        products: The last one of the head makes the logits.
        forward: As of ``LayerShape``.
        backward: As of ``LayerShape``.
        kept: As of ``LayerShape``; logits are not among it.
        parameters: Besides the table.
        table: (rows, columns) of the embedding, or of the head, whose rows t divides.
        cost: As of ``LayerShape``.
    """

    products: tuple[Product, ...] = ()
    forward: Bytes = field(default_factory=Bytes)
    backward: Bytes = field(default_factory=Bytes)
    kept: Bytes = field(default_factory=Bytes)
    parameters: Parameters = field(default_factory=Parameters)
    table: tuple[int, int] = (0, 0)
    cost: float = 0.0

    def table_elements(self, t: int = 1) -> int:
        """Return the number of elements of the table on one of t ranks, padded."""
        rows, columns = self.table
        return -(-rows // t) * columns

    @property
    def flops(self) -> int:
        """Operations of a sample's forward."""
        return sum(product.flops for product in self.products)


@dataclass(frozen=True, kw_only=True)
class Divided:
    """A size that t has to divide.

    Attributes:
        name: For messages.
        size: A number of heads or channels.
        copied: Whether a multiple of it will do for t, as for heads of keys and values.
    """

    name: str
    size: int
    copied: bool = False

    def by(self, t: int) -> bool:
        """Return True if t divides it."""
        return self.size % t == 0 or (self.copied and t % self.size == 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """A model, from its input to its loss. Two of them are equal if they are the same object.

    Attributes:
        runs: Alike layers that follow each other, and how many they are.
        input: What runs before them.
        head: What runs behind them.
        tied: Whether the head's table is the input's.
        sequence_length: s, tokens of a sample for which it was made.
        divided: What t has to divide.
        splits_sequence: Whether sequence parallelism is possible.
        uncut: Why a pipeline cannot cut it.
    """

    runs: tuple[tuple[int, LayerShape], ...]
    input: EndShape
    head: EndShape
    tied: bool
    sequence_length: int
    divided: tuple[Divided, ...] = ()
    splits_sequence: bool = True
    uncut: str = ""

    @property
    def layers(self) -> list[LayerShape]:
        """All layers, in order."""
        return [layer for count, layer in self.runs for _ in range(count)]

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return sum(count for count, _ in self.runs)

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the whole model, a tied table counted once."""
        return self._parameters(active=False)

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters that one token visits: of a layer's experts the chosen
        ones."""
        return self._parameters(active=True)

    @property
    def expert_width(self) -> int | None:
        """Inner channels of one of its experts; None if it has none."""
        return next(
            (layer.experts.width for _, layer in self.runs if layer.experts is not None), None
        )

    @property
    def num_experts(self) -> int | None:
        """Return the number of experts of the model's mixtures; None if it has none."""
        return next(
            (layer.experts.number for _, layer in self.runs if layer.experts is not None), None
        )

    def _parameters(self, *, active: bool) -> int:
        ends = [
            self.input.parameters.on(1),
            self.head.parameters.on(1),
            self.input.table_elements(),
        ]
        tables = 0 if self.tied else self.head.table_elements()
        mixtures = [
            (count, layer.experts) for count, layer in self.runs if layer.experts is not None
        ]
        experts = sum(
            count * (one.chosen if active else one.number) * one.parameters
            for count, one in mixtures
        )
        return (
            sum(count * layer.parameters.on(1) for count, layer in self.runs)
            + experts
            + sum(ends)
            + tables
        )

    def flops(self, *, recompute: bool = False, trained: float = 1.0) -> int:
        """Operations of training on a sample, forward and backward.

        Args:
            recompute: Count the layers' second forward, too.
            trained: Share of the parameters that have gradients.
        """
        layers = sum(count * layer.flops for count, layer in self.runs)
        ends = self.input.flops + self.head.flops
        weighted = sum(count * layer.weighted_flops for count, layer in self.runs) + ends
        return (4 if recompute else 3) * layers + 3 * ends - round((1 - trained) * weighted)
