"""Reader of Hugging Face folders that the package wrote."""

from pathlib import Path

import torch
from safetensors.torch import load_file


def read_huggingface(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder by name."""
    files = sorted(folder.glob("*.safetensors"))
    assert files, folder
    return {name: value for file in files for name, value in load_file(file).items()}
