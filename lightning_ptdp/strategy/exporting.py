"""Export of the trained model as a Hugging Face folder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from lightning_ptdp.checkpoint import CheckpointError, local_path, same_outcome
from lightning_ptdp.exchange import (
    SHARD_BYTES,
    Described,
    FolderExport,
    described_by_module,
    described_by_state,
    merged_rectangles,
    models_in,
)
from lightning_ptdp.strategy.model_space import MODEL, ModelSpace, PathLike

__all__ = ["ModelSpaceExporting"]


class ModelSpaceExporting(ModelSpace):
    """Mixin of the strategy: export in Hugging Face's format, each rank writing its part."""

    def export_huggingface(
        self,
        folder: PathLike,
        *,
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD_BYTES,
        prefix: str | None = None,
        check_only: bool = False,
    ) -> None:
        """Write the current model as a Hugging Face folder.

        The folder contains ``config.json``, ``generation_config.json``, safetensors with their
        index, and the tokenizer files found beside the configuration from which the model was
        built. The module must wrap a Hugging Face model or be a model of this package. LoRA
        adapters are merged into a Hugging Face model. All ranks must call this method after
        ``setup``; they write together.

        Args:
            folder: Target on a file system that all ranks share. An earlier export there is
                replaced when the new one is complete.
            dtype: Type to which floating-point tensors are converted; default: unchanged.
            shard_bytes: Largest number of tensor bytes in one file.
            prefix: Attribute of the model to export, with a trailing dot, if the module holds
                several Hugging Face models.
            check_only: Only check whether the export would be possible now.

        Raises:
            CheckpointError: The export failed on some rank; raised on all ranks. An earlier export
                is left unchanged, and no other files remain.
        """
        target = Path(os.path.abspath(self.broadcast(local_path(folder))))
        doing = f"exporting {target}"
        with self.waiting_in(doing):
            with same_outcome(doing):
                if self._parallel is None:
                    raise CheckpointError(
                        "the model has no values yet. Call export_huggingface after fit has "
                        "set up the strategy"
                    )
                merged = merged_rectangles(
                    self.lightning_module, self._model_tensors(to_write=True)
                )
                rectangles = [replace(one, name=MODEL + one.name) for one in merged]
                described, prefix = self._described(prefix)
            export = FolderExport(
                target=target,
                described=described,
                prefix=prefix,
                dtype=dtype,
                shard_bytes=shard_bytes,
            )
            if check_only:
                export.check(rectangles)
            else:
                export.write(rectangles)

    def _described(self, prefix: str | None) -> tuple[Described, str | None]:
        """Return the description of the module and the prefix of its names.

        Raises:
            CheckpointError: The module holds several Hugging Face models, or it holds none and is
                not a model of this package.
        """
        module, data = (
            self.lightning_module,
            getattr(self.lightning_module.trainer, "datamodule", None),
        )
        owners = {"hyper_parameters": module, "datamodule_hyper_parameters": data}
        state = {name: dict(getattr(one, "hparams", {})) for name, one in owners.items()}
        found = models_in(module)
        if not found:
            return described_by_state(state), prefix
        wanted = [name for name in found if prefix is None or name == prefix.removesuffix(".")]
        if len(wanted) != 1:
            raise CheckpointError(
                f"{type(module).__name__} has several Hugging Face models {sorted(found)}. "
                f"Name the one to export, such as prefix='{next(iter(found))}.'"
            )
        return described_by_module(found[wanted[0]], state), f"{wanted[0]}." * bool(wanted[0])
