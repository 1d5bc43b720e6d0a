"""Passes over the repeated blocks: overlap, float8, compilation, recomputation and offload.

``apply_block_passes`` of ``parallelize.py`` lists them in their order.
"""

__all__: list[str] = []
