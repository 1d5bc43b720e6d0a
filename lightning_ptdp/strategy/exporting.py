"""The strategy's part in exporting: the model that is trained, as a Hugging Face folder."""

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
    """Mixin of the strategy: writes what Hugging Face and those who read its folders load, each
    rank what it has."""

    def export_huggingface(
        self,
        folder: PathLike,
        *,
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD_BYTES,
        prefix: str | None = None,
        check_only: bool = False,
    ) -> None:
        """Write the model, as a checkpoint of now would hold it, as a Hugging Face folder:
        ``config.json``, ``generation_config.json``, safetensors with their index, and the files of
        the tokenizer beside the configuration that the model was built from. The module wraps a
        Hugging Face model, into which adapters of LoRA are merged, or is one of ours. All ranks
        enter it, after ``setup``, and write together.

        Args:
            folder: On a file system that all ranks share; an earlier export there is replaced when
                the new one is whole.
            dtype: What floating-point tensors are converted to; default: as they are.
            shard_bytes: Most bytes of tensors in one file.
            prefix: Where the module holds several Hugging Face models: the attribute of the one,
                with a dot.
            check_only: Only find out whether that could be done now.

        Raises:
            CheckpointError: On all ranks, if it failed on any; what was there before is whole, and
                nothing else is left.
        """
        target = Path(os.path.abspath(self.broadcast(local_path(folder))))
        doing = f"exporting {target}"
        with self.waiting_in(doing):
            with same_outcome(doing):
                if self._parallel is None:
                    raise CheckpointError(
                        "the model has no values yet: export_huggingface is for when fit has set "
                        "the strategy up"
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
            CheckpointError: It holds several Hugging Face models, or none and is none of ours.
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
                f"{type(module).__name__} holds the Hugging Face models {sorted(found)}: name the "
                "one to export, such as "
                f"prefix='{next(iter(found))}.'"
            )
        return described_by_module(found[wanted[0]], state), f"{wanted[0]}." * bool(wanted[0])
