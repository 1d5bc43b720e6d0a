"""Parameters of a rank: their place in the full model, their initial values, and a view of the
uncut model."""

__all__: list[str] = []
