"""The same initial values in every layout, of which each rank makes its part only."""

from lightning_ptdp.initial_values.materialize import Materializer

__all__ = ["Materializer"]
