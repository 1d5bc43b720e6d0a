"""Private and version-dependent names of torch, Lightning, peft, transformers and torchao.

Each name is used in one place only.
"""

__all__: list[str] = []
