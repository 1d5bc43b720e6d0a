"""Callbacks that write a model's outputs: predictions, and continuations of prompts.

Predictions are JSON lines, one per sample, in the order of the samples in any layout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_ptdp.base.option_types import Size, check_arguments
from lightning_ptdp.base.output import say
from lightning_ptdp.callbacks.artifacts import hyperparameters, run_folder, store_table
from lightning_ptdp.generation import Sampling, generate
from lightning_ptdp.generation.decoders import language_model
from lightning_ptdp.generation.tokenizer_text import TextTokenizer, find_tokenizer

_PADDING = -1

Record = dict[str, object]


class PredictionWriter(Callback):
    """Callback that writes the results of ``predict_step`` as JSON lines.

    A result is a tensor, or a mapping of tensors, with one row per sample. If the module has a
    method ``summarize_predictions(outputs)``, its result is written instead.

    A line is ``{"sample": 7, "nll": 61.2, …}``. It contains the number of the sample if the loader
    has a method ``indices(step)``, as ``EvaluationLoader`` has. There -1 marks a row that only
    fills up its batch and is left out. Rank 0 gathers every batch from the other replicas and
    writes it at once. It therefore holds no more than a batch of all replicas.

    Args:
        file: Path of the file; None prints the lines.

    Raises:
        ValueError: (while predicting) ``predict_step`` returns something else.
    """

    def __init__(self, file: str | None = None) -> None:
        self._path = None if file is None else Path(file)
        self._out: TextIO | None = None
        self._written = 0

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the file."""
        self._written = 0
        if trainer.is_global_zero and self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._out = self._path.open("w", encoding="utf-8")

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Gather the replicas' rows and write them."""
        summarize = getattr(pl_module, "summarize_predictions", None)
        if callable(summarize):
            outputs = summarize(outputs)
        records = list(_records(outputs, _indices(trainer, batch_idx, dataloader_idx)))
        gathered = _from_all_replicas(trainer, records)
        if trainer.is_global_zero:
            out = self._out or sys.stdout
            for record in (row for replica in gathered for row in replica):
                out.write(json.dumps(record) + "\n")
                self._written += 1

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the file and print its path."""
        if self._out is not None:
            rank_zero_info(f"{self._written} predictions written to {self._path}")
        self._close()

    def on_exception(self, trainer: Trainer, *_: object) -> None:
        """Close the file, and keep the lines written so far."""
        self._close()

    def _close(self) -> None:
        if self._out is not None:
            self._out.close()
        elif sys.stdout is not None:
            sys.stdout.flush()
        self._out = None


def _indices(trainer: Trainer, batch_idx: int, dataloader_idx: int) -> list[int] | None:
    loader = trainer.predict_dataloaders
    if isinstance(loader, (list, tuple)):
        loader = loader[dataloader_idx]
    indices = getattr(loader, "indices", None)
    return list(indices(batch_idx)) if callable(indices) else None


def _records(outputs: object, indices: list[int] | None) -> Iterator[Record]:
    columns = {"prediction": outputs} if isinstance(outputs, Tensor) else outputs
    if not isinstance(columns, Mapping) or not all(
        isinstance(value, Tensor) and value.dim() for value in columns.values()
    ):
        raise ValueError(
            f"predict_step returned {_kind(outputs)}, but predictions can only be written from "
            "a tensor, or a mapping of tensors, with one row per sample. For other outputs, "
            "give the Trainer your own BasePredictionWriter"
        )
    lists = {str(name): value.detach().to("cpu").tolist() for name, value in columns.items()}
    for row, values in enumerate(zip(*lists.values(), strict=True)):
        record = dict(zip(lists, values, strict=True))
        if indices is None:
            yield record
        elif indices[row] != _PADDING:
            yield {"sample": indices[row], **record}


def _kind(outputs: object) -> str:
    if isinstance(outputs, Mapping):
        return "a mapping of " + ", ".join(
            sorted({type(value).__name__ for value in outputs.values()})
        )
    return "a " + type(outputs).__name__


def _from_all_replicas(trainer: Trainer, records: list[Record]) -> list[list[Record]]:
    """Gather the replicas' predictions on rank 0, in order; collective."""
    mesh = getattr(trainer.strategy, "mesh", None)
    group = None if mesh is None else mesh.group("replicas")
    ranks = range(trainer.world_size) if group is None else group.ranks
    if len(ranks) == 1:
        return [records]
    gathered: list[list[Record]] | None = (
        [[] for _ in ranks] if dist.get_rank() == ranks[0] else None
    )
    dist.gather_object(
        records, gathered, dst=ranks[0], group=None if group is None else group.handle
    )
    return gathered or []


# ---- Continuations of prompts, while a model is trained ------------------------------------------


_T = TypeVar("_T")
_DEFAULT = Sampling()

At = Literal["validation", "end"]


class WriteSamples(Callback):
    """Callback that continues prompts with the model in its current state.

    The model runs in the layout in which it is trained; no rank gathers it. The texts are printed,
    and appended to ``samples.jsonl`` in the run's folder with step and prompt. An MLflow logger
    gets them as the table ``samples.json``, a TensorBoard logger as text. The texts do not
    influence training.

    Args:
        prompts: Texts to continue, or a file with one prompt per line.
        sampling: Options for the choice of tokens.
        chat: Whether each prompt is a user's message in the tokenizer's chat template, and the text
            is the answer.
        at: "validation": at the end of every validation of a fit; "end": after training, where a
            problem gives only a message.
        every_n_validations: At the end of every n-th validation, beginning with the first.
        tokenizer: Folder of the tokenizer; None: that of the prepared data, or of the Hugging Face
            model that the module's ``path`` names.

    Raises:
        ValueError: There are no prompts; (when fit begins) there is no tokenizer.
    """

    def __init__(
        self,
        prompts: list[str] | str,
        sampling: Sampling = _DEFAULT,
        chat: bool = False,
        at: At = "validation",
        every_n_validations: Size = 1,
        tokenizer: str | None = None,
    ) -> None:
        check_arguments(WriteSamples.__init__, locals())
        if not prompts:
            raise ValueError(f"prompts={prompts!r} must be one or more texts, or a file")
        self.prompts = prompts
        self.sampling = sampling
        self.chat = chat
        self.at = at
        self.every_n_validations = every_n_validations
        self.tokenizer = tokenizer
        self._validations = 0
        self._tokenizer: TextTokenizer | None = None

    def texts(self) -> list[str]:
        """Return the prompts.

        Raises:
            ValueError: Their file cannot be read, or has none.
        """
        if not isinstance(self.prompts, str):
            return self.prompts
        try:
            content = Path(self.prompts).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"prompts={self.prompts!r} cannot be read: {error}. Give a file with one prompt per "
                "line, or a list of texts"
            ) from error
        lines = [line for line in content.splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"prompts={self.prompts!r}: the file has no line with a prompt")
        return lines

    def check(self, module: LightningModule, datamodule: LightningDataModule | None) -> None:
        """Check prompts and tokenizer before launch; the data must be prepared.

        Raises:
            ValueError: There are no prompts, or no tokenizer.
        """
        if self.at == "validation":
            state = hyperparameters(module, datamodule)
            self._encode(find_tokenizer(state, self.tokenizer))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check prompts and tokenizer before training."""
        if self.at == "validation":
            self._encoded(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the texts, if they are due."""
        if self.at != "validation" or trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if self._validations % self.every_n_validations == 0:
            self._write(trainer, pl_module)
        self._validations += 1

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the texts, if requested; the run has already printed its paths."""
        if self.at == "end":
            try:
                if language_model(pl_module) is None:
                    raise ValueError(f"{type(pl_module).__name__} has no supported language model")
                self._write(trainer, pl_module)
            except ValueError as error:
                if trainer.is_global_zero:
                    say(f"no sample was written: {error}")

    def _write(self, trainer: Trainer, module: LightningModule) -> None:
        texts, rows, eos_ids = self._encoded(trainer, module)
        written = generate(module, rows, self.sampling, eos_ids=eos_ids)
        if self._tokenizer is not None:
            sequences = [
                new if self.chat else [*row, *new] for row, new in zip(rows, written, strict=True)
            ]
            self._log(trainer, texts, [self._tokenizer.decode(ids) for ids in sequences])

    def _encoded(
        self, trainer: Trainer, module: LightningModule
    ) -> tuple[list[str], list[list[int]], frozenset[int]]:
        """Return the prompts, their ids, and the ids that end a text.

        Only rank 0 has the files and the tokenizer."""

        def encode() -> tuple[list[str], list[list[int]], frozenset[int]]:
            if self._tokenizer is None:
                state = hyperparameters(module, getattr(trainer, "datamodule", None))
                self._tokenizer = find_tokenizer(state, self.tokenizer)
            return self._encode(self._tokenizer)

        return on_rank_zero(trainer, encode)

    def _encode(
        self, tokenizer: TextTokenizer
    ) -> tuple[list[str], list[list[int]], frozenset[int]]:
        texts = self.texts()
        rows = [
            tokenizer.chat([{"role": "user", "content": text}])
            if self.chat
            else tokenizer.encode(text)
            for text in texts
        ]
        return texts, rows, tokenizer.eos_ids

    def _log(self, trainer: Trainer, prompts: Sequence[str], texts: Sequence[str]) -> None:
        step = trainer.global_step
        rows = [
            {"step": step, "prompt": prompt, "text": text}
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        for row in rows:
            say(f"\nsample at step {step} ({row['prompt']!r}):\n{row['text']}")
        folder = run_folder(trainer)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "samples.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        except OSError as error:  # a full disk must not end training
            rank_zero_warn(f"the samples of step {step} could not be stored: {error}")
        for logger in trainer.loggers:
            store_table(
                logger, {key: [row[key] for row in rows] for key in rows[0]}, "samples", step=step
            )


def on_rank_zero(trainer: Trainer, make: Callable[[], _T]) -> _T:
    """Call ``make`` on rank 0 and return its result on all ranks; collective.

    Raises:
        ValueError: The call failed on rank 0; raised with its message on all ranks.
    """
    value: Any = None
    problem = ""
    if trainer.is_global_zero:
        try:
            value = make()
        except (ValueError, OSError) as error:
            problem = str(error)
    value, problem = trainer.strategy.broadcast((value, problem))
    if problem:
        raise ValueError(problem)
    return value
