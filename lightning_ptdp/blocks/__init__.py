"""Passes over the repeated blocks: overlap, float8, compilation, recomputation and offload.

``strategy/block_passes.py`` lists them in their order.
"""

__all__: list[str] = []
