"""Shape of a model for the planner.

A shape has the matrix products, attentions and bytes of the model's layers and ends, for one
sample, and how t divides them. Time, memory and search read nothing else. ``model_trace.py`` traces
the shape of any model, and ``configured_shape.py`` that of the model that a configuration
describes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning_ptdp.world.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of the forward, (rows, inputs) x (inputs, outputs).

    Its backward has one product of the same size for each operand.

    Attributes:
        rows: Rows of a sample, in most layers its tokens.
        outputs: Columns of the result.
        inputs: Terms of each sum.
        cut: Size that t divides: "outputs" (a column layer), "inputs" (a row layer, whose results
            are summed over the ranks), "rows" (rows of heads, in a product of two activations) or
            "none".
        enters: Whether it is the first of several column layers with the same input. The gradient
            of this input is summed over the ranks.
        copied: Number of outputs for key and value heads, of which a rank has at least ``least``.
        least: Number of outputs that are not divided further.
        bias: Whether a bias is added.
        full_sequence: Whether it reads the full sequence in spite of sequence parallelism, as in a
            mixture of experts.
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
    full_sequence: bool = False
    weighted: bool = True

    def local(self, t: int) -> tuple[int, int]:
        """Return (outputs, inputs) on one of t ranks.

        Outputs that t does not divide, such as a vocabulary, are padded.
        """
        if self.cut == "outputs":
            return -(-(self.outputs - self.copied) // t) + max(
                self.least, self.copied // t
            ), self.inputs
        return self.outputs, self.inputs // t if self.cut == "inputs" else self.inputs

    def elements(self, t: int = 1) -> int:
        """Return the elements of the matrix on one of t ranks; 0 if it is not a parameter."""
        if not self.weighted:
            return 0
        outputs, inputs = self.local(t)
        return outputs * inputs

    @property
    def flops(self) -> int:
        """Return the operations of a sample's forward. A multiply-add counts as two operations."""
        return 2 * self.rows * self.outputs * self.inputs


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Scores and weighted values of one attention; t divides the heads.

    Attributes:
        queries: Query positions of a sample.
        keys: Key positions of a sample.
        heads: Number of heads.
        kv_heads: Number of heads of keys and values; a rank has at least one.
        head_dim: Channels of a head's queries and keys.
        value_dim: Channels of a head's values.
        causal: Whether half of the scores are masked.
        dropout: Whether attention weights are dropped.
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
        """Return the heads of queries, and of keys, on one of t ranks."""
        return self.heads // t, max(1, self.kv_heads // t)

    @property
    def flops(self) -> int:
        """Return the operations of a sample's forward, over all pairs of positions."""
        return 2 * self.queries * self.keys * self.heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of a sample, by what divides them in addition to c.

    Attributes:
        replicated: Bytes that every rank of a tensor group has, or 1/t of them with sequence
            parallelism.
        split: Bytes that t divides.
        once: Bytes of a microbatch, independent of its number of samples; nothing divides them.
    """

    replicated: float = 0.0
    split: float = 0.0
    once: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters.

    Attributes:
        replicated: Parameters that every rank has.
        split: Parameters that t divides.
        copied: Parameters of key and value heads.
        heads: Number of key and value heads; a rank has at least one.
    """

    replicated: int = 0
    split: int = 0
    copied: int = 0
    heads: int = 1

    def on(self, t: int) -> int:
        """Return the number of parameters on one of t ranks."""
        return (
            self.replicated + self.split // t + self.copied * max(1, self.heads // t) // self.heads
        )


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The experts from which a layer's router chooses.

    The router and the experts that every token visits are ordinary products.

    Attributes:
        number: E, experts of the layer.
        chosen: k, experts that a token visits.
        hidden: h, channels of a token.
        width: f, inner channels of one expert.
        gated: Whether the experts have a gate in addition to the inner channels, as in SwiGLU.
        bias: Whether the experts have biases.
    """

    number: int
    chosen: int
    hidden: int
    width: int
    gated: bool = True
    bias: bool = False

    @property
    def matrices(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (outputs, inputs) of one expert's matrices: up, with any gate, and down."""
        return ((2 if self.gated else 1) * self.width, self.hidden), (self.hidden, self.width)

    @property
    def parameters(self) -> int:
        """Return the number of parameters of one expert."""
        return sum(outputs * (inputs + self.bias) for outputs, inputs in self.matrices)

    def local(self, layout: ParallelLayout) -> int:
        """Return the number of a layer's expert parameters on a rank.

        Biases of the second matrix are not split.
        """
        width = self.width // layout.expert_tensor_parallel_size
        return self.number // layout.expert_parallel_size * replace(self, width=width).parameters

    @property
    def flops(self) -> int:
        """Return the operations of a token's forward. A multiply-add counts as two operations."""
        return 2 * self.chosen * sum(outputs * inputs for outputs, inputs in self.matrices)


@dataclass(frozen=True, kw_only=True)
class EndShape:
    """Work before the layers, or after them, in bytes of a given precision and software.

    Attributes:
        products: Products in the order of the forward; the head's last one computes the logits.
        forward: Bytes that the operations between products read and write, without scores in
            memory.
        backward: Bytes that the operations between products of the backward read and write.
        kept: Bytes kept for the backward, without logits and without those that attentions keep,
            which include the attentions' inputs.
        parameters: Numbers of parameters in addition to the table.
        table: (rows, columns) of the embedding, or of the head; t divides the rows.
        cost: Multiply-adds per token, as the pipeline's partition counts them
            (``pipeline/containers.py``).
    """

    products: tuple[Product, ...]
    forward: Bytes
    backward: Bytes
    kept: Bytes
    parameters: Parameters
    table: tuple[int, int] = (0, 0)
    cost: float

    def elements(self, t: int = 1) -> int:
        """Return the elements of the matrices on one of t ranks."""
        return sum(product.elements(t) for product in self.products)

    def table_elements(self, t: int = 1) -> int:
        """Return the number of elements of the table on one of t ranks, padded."""
        rows, columns = self.table
        return -(-rows // t) * columns

    @property
    def flops(self) -> int:
        """Return the operations of a sample's forward."""
        return sum(product.flops for product in self.products)


@dataclass(frozen=True, kw_only=True)
class LayerShape(EndShape):
    """One layer, which has no table.

    Attributes:
        attentions: Attentions in the order of the forward.
        crossing: Bytes of a sample that the previous layer passes on.
        gated: Whether its feed-forward part has a gate, as SwiGLU has.
        experts: Experts from which its router chooses; products, bytes and
            parameters exclude them.
    """

    attentions: tuple[AttentionShape, ...]
    crossing: float
    gated: bool
    experts: ExpertShape | None

    @property
    def flops(self) -> int:
        """Return the operations of a sample's forward."""
        attentions = sum(attention.flops for attention in self.attentions)
        return super().flops + attentions + self._expert_flops

    @property
    def weighted_flops(self) -> int:
        """Return the operations of products with a parameter."""
        weighted = sum(product.flops for product in self.products if product.weighted)
        return weighted + self._expert_flops

    def expert_parameters(self, layout: ParallelLayout) -> int:
        """Return the number of its experts' parameters on a rank."""
        return 0 if self.experts is None else self.experts.local(layout)

    @property
    def _expert_flops(self) -> int:
        return 0 if self.experts is None else self.products[0].rows * self.experts.flops


@dataclass(frozen=True, kw_only=True)
class Divided:
    """A size that t has to divide.

    Attributes:
        name: Name in messages.
        size: Number of heads or channels.
        copied: Whether t may also be a multiple of it, as for heads of keys and values.
    """

    name: str
    size: int
    copied: bool = False

    def by(self, t: int) -> bool:
        """Return True if t divides the size."""
        return self.size % t == 0 or (self.copied and t % self.size == 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """A model, from its input to its loss. Two models are equal only if they are identical.

    Attributes:
        runs: (number, layer) of equal consecutive layers.
        input: Work before the layers.
        head: Work after the layers.
        tied: Whether the head's table is the input's table.
        sequence_length: s, tokens of a sample for which the shape was made.
        divided: Sizes that t has to divide.
        splits_sequence: Whether sequence parallelism is possible.
        uncut: Reason that a pipeline cannot cut the model; "" if it can.
    """

    runs: tuple[tuple[int, LayerShape], ...]
    input: EndShape
    head: EndShape
    tied: bool
    sequence_length: int
    divided: tuple[Divided, ...]
    splits_sequence: bool
    uncut: str

    @property
    def layers(self) -> list[LayerShape]:
        """Return all layers in order."""
        return [layer for count, layer in self.runs for _ in range(count)]

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return sum(count for count, _ in self.runs)

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the model; a tied table is counted once."""
        return self._parameters(active=False)

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters that one token visits.

        Of a layer's experts, only the chosen ones count.
        """
        return self._parameters(active=True)

    @property
    def experts(self) -> ExpertShape | None:
        """Return the experts of the model's mixtures, or None if it has none."""
        return next((layer.experts for _, layer in self.runs if layer.experts is not None), None)

    def _parameters(self, *, active: bool) -> int:
        ends = [
            self.input.parameters.on(1),
            self.head.parameters.on(1),
            self.input.table_elements(),
        ]
        tables = 0 if self.tied else self.head.table_elements()
        total = sum(ends) + tables
        for count, layer in self.runs:
            total += count * layer.parameters.on(1)
            if layer.experts is not None:
                visited = layer.experts.chosen if active else layer.experts.number
                total += count * visited * layer.experts.parameters
        return total

    def flops(self, *, recompute: bool = False, trained: float = 1.0) -> int:
        """Return the operations of training on a sample, forward and backward.

        Args:
            recompute: Count the layers' second forward, too.
            trained: Share of the parameters that have gradients.
        """
        layers = sum(count * layer.flops for count, layer in self.runs)
        ends = self.input.flops + self.head.flops
        weighted = sum(count * layer.weighted_flops for count, layer in self.runs) + ends
        return (4 if recompute else 3) * layers + 3 * ends - round((1 - trained) * weighted)
