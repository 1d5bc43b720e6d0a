"""Configurations of GPT and BERT."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_ptdp.base.option_types import Count, Size, check_types


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes of every transformer here; the subclasses document them.

    Raises:
        ValueError: Sizes do not fit together. The message names the field and values that work.
    """

    vocabulary_size: Size
    sequence_length: Size
    num_layers: Size = 12
    hidden_size: Size = 768
    num_heads: Size = 12
    ffn_hidden_size: Size | None = None
    dropout: float = 0.0
    init_std: float = 0.02
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_heads

    @property
    def ffn_size(self) -> int:
        """Inner width of the feed-forward part, with the default filled in."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def bias(self) -> bool:
        """Return True if linear layers have biases."""
        return True

    @property
    def truncated_init(self) -> bool:
        """Return True if initial weights are within two standard deviations of 0."""
        return False

    @property
    def residual_std(self) -> float:
        """Standard deviation of the initial weights of layers that write to the residual stream.

        l blocks add 2l such outputs. Each therefore starts smaller by sqrt(2l).
        """
        return self.init_std / math.sqrt(2 * self.num_layers)

    @property
    def attention_dropout_rate(self) -> float:
        """Dropout of the attention weights, with the default filled in."""
        return self.dropout

    def __post_init__(self) -> None:
        check_types(self)
        for name, value in vars(self).items():
            if (
                name in ("dropout", "attention_dropout")
                and value is not None
                and not 0.0 <= value < 1.0
            ):
                raise ValueError(
                    f"{name}={value} must be at least 0 and less than 1. Use 0 to disable it"
                )
            if name in ("init_std", "norm_eps", "rope_base") and not value > 0:
                raise ValueError(f"{name}={value} must be greater than 0")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}. "
                f"Use a num_heads of {_near(self.hidden_size, self.num_heads)}"
            )


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """Sizes and layout of a decoder-only transformer.

    The defaults are GPT-2 small (124 M parameters). ``GPTConfig.gpt2(...)`` and
    ``GPTConfig.llama(...)`` are the two usual sets of choices. Every field can be set separately.

    Args:
        vocabulary_size: V, number of token ids.
        sequence_length: Longest sequence that the model accepts, in tokens.
        num_layers: l, number of blocks.
        hidden_size: h, width of the residual stream.
        num_heads: Number of attention heads; must divide ``hidden_size``.
        num_kv_heads: Number of key/value heads, each shared by an equal group of query heads (GQA,
            arXiv 2305.13245); None: ``num_heads``.
        ffn_hidden_size: f, inner width of the feed-forward part. None: 4h for ``mlp="gelu"``, and
            for ``mlp="swiglu"`` the Llama rule (arXiv 2302.13971, section 2.2): 8h/3 rounded up to
            a multiple of 256 (of 64 below h = 1024).
        norm: "layer" (LayerNorm) or "rms" (RMSNorm, arXiv 1910.07467).
        position: "learned" (an embedding of the position) or "rope" (rotation of queries and keys,
            arXiv 2104.09864).
        mlp: "gelu" (tanh approximation, as in GPT-2) or "swiglu" (arXiv 2002.05202).
        bias: Use biases in the linear layers and in LayerNorm.
        tie_embeddings: Use the token embedding's weight in the output head.
        dropout: Probability on the embeddings, the attention weights and the two residual branches.
        init_std: Standard deviation of the initial weights. The two projections that write to the
            residual stream use ``init_std / sqrt(2 l)`` (GPT-2).
        norm_eps: Epsilon of the norms.
        rope_base: Base of the rotary wavelengths.
        num_experts: E, number of experts in a layer; a router chooses some of them for each token.
            None: one feed-forward part for all tokens. Experts are gated and have no biases
            (``mlp="swiglu"``, ``bias=False``).
        experts_per_token: k. If k > 1, the weights of the experts are their scores, normalized to
            the sum 1. If k = 1, the weight is the score (arXiv 2101.03961).
        shared_experts: Number of additional experts of the same width that every token visits
            (arXiv 2401.06066), as one feed-forward part.
        expert_hidden_size: Inner width of one expert; None: f.
        dense_layers: Number of first layers that have one feed-forward part of width f instead of
            experts.
        router_score: Score of an expert for a token: "softmax" over the experts, or "sigmoid" for
            each (arXiv 2412.19437).
        balance: Method that keeps the experts equally busy: "loss" (arXiv 2101.03961), "bias" or
            "none". "bias" is a bias on the scores that only affects the choice of experts, and
            moves with their load in each step (arXiv 2408.15664).
        balance_coefficient: Factor of the balancing loss.
        z_loss_coefficient: Factor of the mean square of the logits' log-sum-exp (arXiv 2202.08906,
            section 3.2), with any ``balance``.
        bias_rate: Change of the bias in an optimizer step.
        capacity_factor: Limit of an expert in training: this many times its even share of one
            sequence's choices, k s / E, rounded up. The earliest choices are kept, the rest is
            dropped. None: no limit.

    Raises:
        ValueError: Sizes do not fit together. The message names the field and values that work.
    """

    vocabulary_size: Size = 50257
    sequence_length: Size = 1024
    num_kv_heads: Size | None = None
    norm: Literal["layer", "rms"] = "layer"
    position: Literal["learned", "rope"] = "learned"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    tie_embeddings: bool = True
    rope_base: float = 10_000.0
    num_experts: Size | None = None
    experts_per_token: Size = 2
    shared_experts: Count = 0
    expert_hidden_size: Size | None = None
    dense_layers: Count = 0
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    balance: Literal["loss", "bias", "none"] = "loss"
    balance_coefficient: float = 0.01
    z_loss_coefficient: float = 0.001
    bias_rate: float = 0.001
    capacity_factor: float | None = None

    @classmethod
    def gpt2(cls, **changes: Any) -> GPTConfig:
        """Return the GPT-2 layout: LayerNorm, learned positions, GELU, biases, tied head."""
        return cls(**changes)

    @classmethod
    def llama(cls, **changes: Any) -> GPTConfig:
        """Return the Llama layout: RMSNorm, rotary positions, SwiGLU, no biases, untied head."""
        layout: dict[str, Any] = {
            "norm": "rms",
            "position": "rope",
            "mlp": "swiglu",
            "bias": False,
            "tie_embeddings": False,
        }
        return cls(**(layout | changes))

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, with the default filled in."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def ffn_size(self) -> int:
        """Inner width of the feed-forward part, with the default filled in."""
        if self.ffn_hidden_size is not None or self.mlp == "gelu":
            return super().ffn_size
        multiple = 256 if self.hidden_size >= 1024 else 64
        return -(-8 * self.hidden_size // (3 * multiple)) * multiple

    @property
    def expert_size(self) -> int:
        """Inner width of one expert, with the default filled in."""
        return self.ffn_size if self.expert_hidden_size is None else self.expert_hidden_size

    @property
    def has_experts(self) -> bool:
        """Return True if any layer is a mixture."""
        return self.num_experts is not None

    @property
    def layers_with_experts(self) -> int:
        """Return the number of layers that are mixtures."""
        return 0 if self.num_experts is None else self.num_layers - self.dense_layers

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_experts()
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}, "
                "but every key/value head must have the same number of query heads. Use a "
                f"num_kv_heads of {_near(self.num_heads, self.kv_heads)}"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(
                "position='rope' rotates pairs of channels, but hidden_size / num_heads = "
                f"{self.hidden_size} / {self.num_heads} = {self.head_dim} is odd. Change "
                "num_heads or hidden_size, or use position='learned'"
            )

    def _check_experts(self) -> None:
        names = [field.name for field in fields(GPTConfig)]
        options = {
            name: getattr(self, name)
            for name in names[names.index("num_experts") + 1 :]
            if getattr(self, name) != getattr(GPTConfig, name)
        }
        by_balance = {"loss": "balance_coefficient", "bias": "bias_rate"}
        for name, value in options.items():
            if self.num_experts is None:
                raise ValueError(
                    f"{name}={value!r} needs a model with experts. Set num_experts too, or "
                    f"leave {name} out"
                )
            if name in by_balance.values() and by_balance.get(self.balance) != name:
                method = next(balance for balance, field in by_balance.items() if field == name)
                raise ValueError(
                    f"{name}={value} has no effect with balance={self.balance!r}. Use "
                    f"balance={method!r}, or leave {name} out"
                )
            if name == "capacity_factor" and value <= 0:
                raise ValueError(
                    f"{name}={value} must be greater than 0. Use None to drop no tokens"
                )
            if name == "bias_rate" and not 1e-9 <= value <= 1:
                raise ValueError(
                    f"bias_rate={value} must be from 1e-9 to 1, because scores are at most 1. "
                    "Use balance='none' to disable the biases"
                )
            if isinstance(value, float) and value < 0:
                raise ValueError(f"{name}={value} must be at least 0")
        if self.num_experts is None:
            return
        if self.mlp != "swiglu" or self.bias:
            raise ValueError(
                f"num_experts={self.num_experts} does not work with mlp={self.mlp!r} and "
                f"bias={self.bias}, because experts are gated and have no biases. Use "
                "mlp='swiglu' and bias=False, as GPTConfig.llama does"
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than "
                f"num_experts={self.num_experts}. Use at most {self.num_experts}"
            )
        if self.dense_layers >= self.num_layers:
            raise ValueError(
                f"dense_layers={self.dense_layers} of num_layers={self.num_layers} leaves no layer "
                f"with experts. Use at most {self.num_layers - 1}, or leave num_experts out"
            )


@dataclass(frozen=True, kw_only=True)
class BertConfig(TransformerConfig):
    """Sizes and layout of a bidirectional encoder.

    The defaults are BERT base (110 M parameters, arXiv 1810.04805). ``BertConfig.original(...)``
    and ``BertConfig.megatron(...)`` are the two usual sets of choices. Every field can be set
    separately.

    Args:
        vocabulary_size: V, number of token ids.
        sequence_length: Longest sequence that the model accepts, in tokens, special ones included.
        num_layers: l, number of blocks.
        hidden_size: h, width of the residual stream.
        num_heads: Number of attention heads; must divide ``hidden_size``.
        ffn_hidden_size: f, inner width of the feed-forward part; None: 4h.
        num_segments: Number of token types; a pair of sentences has two.
        norm_order: Position of LayerNorm. "post": after the residual sum and after the embeddings
            (arXiv 1810.04805). "pre": before attention and feed-forward part and after the last
            block; this order trains at 24 layers of h = 2048 and more (arXiv 1909.08053, section
            5.3, figure 7).
        gelu: "exact" (by the error function) or "tanh" (its approximation).
        dropout: Probability on the embeddings and the residual branches.
        attention_dropout: Probability on the attention weights; None: ``dropout``.
        init_std: Standard deviation of the initial weights.
        truncated_init: Draw initial weights within two standard deviations of 0 (as in the
            original's code).
        scaled_residual_init: Use ``init_std / sqrt(2 l)`` for the two projections that write to the
            residual stream (arXiv 1909.08053, section 4.2).
        norm_eps: Epsilon of LayerNorm.

    Raises:
        ValueError: Sizes do not fit together. The message names the field and values that work.
    """

    vocabulary_size: Size = 30522
    sequence_length: Size = 512
    num_segments: Size = 2
    norm_order: Literal["post", "pre"] = "post"
    gelu: Literal["exact", "tanh"] = "exact"
    dropout: float = 0.1
    attention_dropout: float | None = None
    truncated_init: bool = True
    scaled_residual_init: bool = False
    norm_eps: float = 1e-12

    @classmethod
    def original(cls, **changes: Any) -> BertConfig:
        """Return BERT as published (arXiv 1810.04805).

        It has LayerNorm after the sums, exact GELU and truncated initial weights.
        """
        return cls(**changes)

    @classmethod
    def megatron(cls, **changes: Any) -> BertConfig:
        """Return Megatron's BERT (arXiv 1909.08053, section 5.3).

        It has LayerNorm before each part, GELU by tanh and smaller residual projections.
        """
        layout = {
            "norm_order": "pre",
            "gelu": "tanh",
            "truncated_init": False,
            "scaled_residual_init": True,
            "norm_eps": 1e-5,
        }
        return cls(**{**layout, **changes})

    @property
    def residual_std(self) -> float:
        """Standard deviation of the initial weights of layers that write to the residual stream."""
        return super().residual_std if self.scaled_residual_init else self.init_std

    @property
    def attention_dropout_rate(self) -> float:
        """Dropout of the attention weights, with the default filled in."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout


def check_tensor_parallel(config: TransformerConfig, tensor_parallel_size: int) -> None:
    """Check that every rank gets whole heads and an equal share of the feed-forward part.

    The vocabulary needs no check, because it is padded to a multiple. If there are fewer key/value
    heads than ranks, every rank gets one.

    Raises:
        ValueError: A size does not divide. The message lists the degrees that work.
    """
    widths = split_widths(config)
    sizes = {"num_heads": config.num_heads, "num_kv_heads": config.kv_heads, **widths}
    for name, size in sizes.items():
        copied = name == "num_kv_heads" and tensor_parallel_size % size == 0
        if size % tensor_parallel_size and not copied:
            divides_all = (
                t
                for t in range(1, config.num_heads + 1)
                if not any(n % t for n in (config.num_heads, *widths.values()))
            )
            working = ", ".join(
                str(t) for t in divides_all if config.kv_heads % t == 0 or t % config.kv_heads == 0
            )
            raise ValueError(
                f"{name}={size} is not divisible by tensor_parallel_size={tensor_parallel_size}. "
                f"For this model, use a tensor_parallel_size of {working}"
            )


def split_widths(config: TransformerConfig) -> dict[str, int]:
    """Return the inner widths that are split over the tensor-parallel ranks; experts are not."""
    if not isinstance(config, GPTConfig) or config.num_experts is None:
        return {"ffn_hidden_size": config.ffn_size}
    dense = {"ffn_hidden_size": config.ffn_size} if config.dense_layers else {}
    shared = (
        {"shared_experts * expert_hidden_size": config.shared_experts * config.expert_size}
        if config.shared_experts
        else {}
    )
    return dense | shared


def _near(number: int, target: int) -> str:
    """Return the divisors of ``number`` nearest to ``target``, for a message."""
    # Imported here: a configuration alone needs no layout.
    from lightning_ptdp.world.axes import nearest_divisors

    return ", ".join(str(divisor) for divisor in nearest_divisors(number, target))
