"""Parameters of a rank.

The modules describe a parameter's place in the full model, its initial values, and a view of the
uncut model.
"""

__all__: list[str] = []
