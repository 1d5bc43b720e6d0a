"""Private and version-dependent names of torch, Lightning, peft, transformers and torchao, each in
one place."""

__all__: list[str] = []
