"""Closed-form parameter and FLOP counts of arXiv 2104.04473."""


def ptdp_parameters(
    *, num_layers: int, hidden_size: int, vocabulary_size: int, sequence_length: int
) -> float:
    """Return the parameters of a GPT-2-like model: P = 12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h))
    (arXiv 2104.04473, section 5.1)."""
    layers, h = num_layers, hidden_size
    return (
        12
        * layers
        * h**2
        * (1 + 13 / (12 * h) + (vocabulary_size + sequence_length) / (12 * layers * h))
    )


def ptdp_step_flops(
    *,
    batch_size: int,
    sequence_length: int,
    num_layers: int,
    hidden_size: int,
    vocabulary_size: int,
    recompute: bool = True,
) -> float:
    """Return the FLOPs of one training step: F = 96 B s l h^2 (1 + s/(6h) + V/(16 l h))
    (arXiv 2104.04473, section 5.1).

    ``recompute=False`` is the count without recomputation (72 B s l h^2 in place of 96). The
    head's term 6 B s h V is equal in both, because the head is never recomputed.
    """
    layers, h, tokens = num_layers, hidden_size, batch_size * sequence_length
    blocks = (96 if recompute else 72) * tokens * layers * h**2 * (1 + sequence_length / (6 * h))
    return blocks + 6 * tokens * h * vocabulary_size
