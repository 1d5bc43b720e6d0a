"""Conversion between checkpoints of this package and the file formats of other libraries.

The formats are Hugging Face folders, folders of peft's adapters, state dicts, and Lightning's
single ``.ckpt`` file. A conversion runs in one process and never holds the whole model in memory,
except when it writes a format of ``torch.save``, or merges adapters into the weights.
"""

from lightning_ptdp.checkpoint.tensor_files import open_safetensors, write_safetensors
from lightning_ptdp.exchange.converter import convert, kind_of, kind_of_result
from lightning_ptdp.exchange.export import SHARD_BYTES, FolderExport, to_huggingface, verify_export
from lightning_ptdp.exchange.export_content import (
    Described,
    described_by_module,
    described_by_state,
)
from lightning_ptdp.exchange.folder_weights import (
    HuggingFaceNames,
    HuggingFaceWeights,
    models_in,
    names_in,
)
from lightning_ptdp.exchange.merging import merged_rectangles
from lightning_ptdp.exchange.model_folder import reads_as_huggingface
from lightning_ptdp.exchange.native_models import (
    FAMILIES,
    from_huggingface,
    open_native,
    weights_opener,
)
from lightning_ptdp.exchange.state_dict_files import from_state_dict, open_state_dict, to_state_dict

__all__ = [
    "FAMILIES",
    "SHARD_BYTES",
    "Described",
    "FolderExport",
    "HuggingFaceNames",
    "HuggingFaceWeights",
    "convert",
    "described_by_module",
    "described_by_state",
    "from_huggingface",
    "from_state_dict",
    "kind_of",
    "kind_of_result",
    "merged_rectangles",
    "models_in",
    "names_in",
    "open_native",
    "open_safetensors",
    "open_state_dict",
    "reads_as_huggingface",
    "to_huggingface",
    "to_state_dict",
    "verify_export",
    "weights_opener",
    "write_safetensors",
]
