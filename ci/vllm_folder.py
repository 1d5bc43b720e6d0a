"""Load an exported Llama with vLLM's configuration, model and loader, and compare every value.

    python ci/vllm_folder.py FOLDER

Runs on a CPU, in an environment of its own with vllm (tried: 0.33.0). No text is generated, which
needs vLLM's GPU kernels. The exit code is 1 if a value is not that of the folder.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import vllm.platforms
from safetensors.torch import load_file
from vllm.platforms.cpu import CpuPlatform

# vLLM computes these together.
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def loaded(folder: str) -> dict[str, torch.Tensor]:
    """Return the parameters of vLLM's model."""
    # The wheel on PyPI looks for a GPU. The modules below take the platform when they are imported.
    vllm.platforms._current_platform = CpuPlatform()

    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(model=folder, dtype="float32", enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as store:
        init_distributed_environment(1, 0, f"file://{store}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = initialize_model(vllm_config=config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    return {name: value.detach() for name, value in model.named_parameters()}


def stored(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the values of the folder for a parameter of vLLM, and remove them."""
    for joined, parts in JOINED.items():
        if f".{joined}." in name:
            return torch.cat([tensors.pop(name.replace(joined, part)) for part in parts])
    return tensors.pop(name)


def main(folder: str) -> int:
    """Compare, and print the result."""
    tensors = {}
    for file in Path(folder).glob("*.safetensors"):
        tensors |= load_file(file)
    parameters, wrong = loaded(folder), []
    for name, value in parameters.items():
        expected = stored(name, tensors).to(value)
        # A vocabulary has further rows up to a multiple of 64.
        if not torch.equal(value[: len(expected)], expected):
            wrong.append(name)
    print(f"{len(parameters)} parameters of vLLM, {len(wrong)} wrong, {len(tensors)} not used")
    return int(bool(wrong or tensors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
