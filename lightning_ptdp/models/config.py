"""The sizes that every transformer here has."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ptdp.option_types import Size, check_types

__all__ = ["TransformerConfig", "check_tensor_parallel", "near"]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes of a transformer, explained where its choices are.

    Raises:
        ValueError: Sizes that do not fit together; the message names the field and what would work.
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

    def __post_init__(self) -> None:
        check_types(self)
        for name, value in vars(self).items():
            if name in ("dropout", "attention_dropout") and value is not None and not 0.0 <= value < 1.0:
                raise ValueError(f"{name}={value} must be at least 0 and below 1; use 0 for none")
            if name in ("init_std", "norm_eps", "rope_base") and not value > 0:
                raise ValueError(f"{name}={value} must be greater than 0")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}; use a num_heads of "
                f"{near(self.hidden_size, self.num_heads)}"
            )


def near(number: int, wanted: int) -> str:
    """The divisors of ``number`` that are near to what was wanted, for a message."""
    # Imported here: a configuration alone needs no layout.
    from lightning_ptdp.world.layout import nearest_divisors

    return ", ".join(str(divisor) for divisor in nearest_divisors(number, wanted))


def check_tensor_parallel(config: TransformerConfig, tensor_parallel_size: int) -> None:
    """Check that every rank gets whole heads and an equal share of the feed-forward part.

    The vocabulary needs no check: it is padded to a multiple. Of fewer heads of keys and values than ranks, every rank gets one.

    Raises:
        ValueError: A size does not divide; the message lists the degrees that work.
    """
    sizes = {"num_heads": config.num_heads, "num_kv_heads": config.kv_heads, "ffn_hidden_size": config.ffn_size}
    for name, size in sizes.items():
        copied = name == "num_kv_heads" and tensor_parallel_size % size == 0
        if size % tensor_parallel_size and not copied:
            divides_both = (t for t in range(1, config.num_heads + 1) if config.num_heads % t == config.ffn_size % t == 0)
            working = ", ".join(str(t) for t in divides_both if config.kv_heads % t == 0 or t % config.kv_heads == 0)
            raise ValueError(
                f"{name}={size} is not divisible by tensor_parallel_size={tensor_parallel_size}; this model works with a "
                f"tensor_parallel_size of {working}"
            )
