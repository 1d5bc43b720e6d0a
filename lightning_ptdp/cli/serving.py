"""Text generation by a model that the Trainer has set up in its layout."""

from __future__ import annotations

import inspect
import io
import logging
import os
import queue
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, TypeAlias, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import instantiate_module

from lightning_ptdp.base.signals import handled
from lightning_ptdp.callbacks.written_outputs import on_rank_zero
from lightning_ptdp.checkpoint import CheckpointError, read_state
from lightning_ptdp.checkpoint.remote_path import located
from lightning_ptdp.cli.failures import UserError, ending_workers
from lightning_ptdp.cli.run_checks import check_checkpoint
from lightning_ptdp.cli.serving_verbs import ServingOptions
from lightning_ptdp.exchange import open_state_dict, reads_as_huggingface
from lightning_ptdp.exchange.adapter_weights import is_adapter_folder, read_adapter_folder
from lightning_ptdp.generation import Sampling, generate
from lightning_ptdp.generation.decoders import longest_sequence
from lightning_ptdp.generation.tokenizer_text import Message, TextTokenizer
from lightning_ptdp.models import LitCausalLM, LitDPO, LitGPT
from lightning_ptdp.strategy import PTDPStrategy

_END = None
"""Marks the end of the questions in the queue."""
_T = TypeVar("_T")
_Lines: TypeAlias = "queue.SimpleQueue[str | None]"
_HEARTBEAT_S = 20.0
"""Longest time between two messages to the other ranks.

Ranks treat a longer silence as the loss of a rank.
"""


@dataclass(eq=False)
class Continuation(Callback):
    """A callback that prints a prompt and its continuation."""

    tokenizer: TextTokenizer
    sampling: Sampling
    prompt: str

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate the continuation and print it on rank 0."""
        row = on_rank_zero(trainer, lambda: self.tokenizer.encode(self.prompt))
        written = _timed(trainer, pl_module, row, self.sampling, self.tokenizer)
        if trainer.is_global_zero:
            print(self.tokenizer.decode([*row, *written]), flush=True)


class Chat(Callback):
    """A callback that answers the lines of the standard input.

    Raises:
        ValueError: The tokenizer has no chat template, or its template has no place for ``system``.
    """

    def __init__(self, tokenizer: TextTokenizer, sampling: Sampling, *, system: str | None) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._begin: list[Message] = (
            [] if system is None else [{"role": "system", "content": system}]
        )
        tokenizer.chat([*self._begin, {"role": "user", "content": "?"}])
        self._source = _own_input()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Answer questions until the input ends or Ctrl-C arrives.

        The current answer is finished first.
        """
        lines = _lines(self._source) if trainer.is_global_zero else queue.SimpleQueue()
        stop = _stopper(lines)
        with handled(signal.SIGINT, stop), handled(signal.SIGTERM, stop):
            self._talk(trainer, pl_module, lines)

    def _talk(self, trainer: Trainer, pl_module: LightningModule, lines: _Lines) -> None:
        messages = list(self._begin)
        turn = 0
        while (question := _next(trainer, lines)) is not None:
            if question == "/new":
                messages = list(self._begin)
                continue
            messages.append({"role": "user", "content": question})
            try:
                row = on_rank_zero(trainer, lambda: self._tokenizer.chat(messages))  # noqa: B023
            except ValueError as error:
                if trainer.is_global_zero:
                    print(f"ptdp: {error}", file=sys.stderr, flush=True)
                messages.pop()
                continue
            sampling = replace(self._sampling, seed=self._sampling.seed + turn)
            written = _timed(trainer, pl_module, row, sampling, self._tokenizer)
            turn += 1
            answer = self._tokenizer.decode(written).strip()
            messages.append({"role": "assistant", "content": answer})
            if trainer.is_global_zero:
                print(answer, flush=True)


def serve(
    module: LightningModule, writer: Callback, options: ServingOptions, *, ckpt_path: str | None
) -> None:
    """Set up ``module`` in its layout, and run the callback ``writer``.

    Raises:
        ValueError: The layout or the checkpoint does not fit. The error is raised before a process
            is started where possible.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings(
        "ignore",
        message=".*(LeafSpec|does not have many workers|callbacks used to create the checkpoint).*",
    )
    t = options.tensor_parallel_size
    p = options.pipeline_parallel_size
    if options.accelerator == "gpu" and not torch.cuda.is_available():
        raise UserError(
            "--accelerator gpu: torch finds no GPU (for the reason, run ptdp doctor). Use "
            "--accelerator cpu"
        )
    trainer = Trainer(
        strategy=PTDPStrategy(
            tensor_parallel_size=t, pipeline_parallel_size=p, start_method=options.start_method
        ),
        accelerator=options.accelerator,
        devices=t * p,
        precision=options.precision,
        callbacks=[writer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with ending_workers(trainer):
        trainer.predict(
            # Without batches: the callback does all the work.
            module,
            iter(()),
            ckpt_path=ckpt_path,
            return_predictions=False,
        )


def module_of(
    checkpoint: str, scratch: Path
) -> tuple[Mapping[str, Any], LightningModule, str | None]:
    """Return a checkpoint's state, its module without values, and the path of the values.

    The path is None if the module itself finds its values.

    Args:
        checkpoint: A checkpoint, a Hugging Face folder, or a folder of peft's adapters.
        scratch: Empty folder for a checkpoint made from adapters.

    Raises:
        CheckpointError: The adapters are damaged or of another kind.
        UserError: There is no checkpoint, or it does not name the model that it holds.
    """
    if reads_as_huggingface(checkpoint):
        module: LightningModule = LitCausalLM(checkpoint, dtype="auto")
        return {"hyper_parameters": dict(module.hparams)}, module, None
    if is_adapter_folder(Path(checkpoint)):
        options, tensors = read_adapter_folder(Path(checkpoint))
        torch.save(
            {"state_dict": tensors, "pytorch-lightning_version": pl.__version__},
            scratch / "adapters.ckpt",
        )
        return (
            {"hyper_parameters": options},
            LitCausalLM(**options, dtype="auto"),
            str(scratch / "adapters.ckpt"),
        )
    state = _state(checkpoint)
    arguments = {
        name: value
        for name, value in state.get("hyper_parameters", {}).items()
        if name != "_instantiator"
    }
    if "_class_path" in arguments:
        return state, instantiate_module(LightningModule, arguments), checkpoint
    kinds: list[Any] = [LitGPT, LitCausalLM, LitDPO]
    for kind in kinds:
        # a subclass passes its further arguments on
        known = {name for base in kind.__mro__ for name in inspect.signature(base).parameters}
        first = next(iter(inspect.signature(kind).parameters))
        if arguments and arguments.keys() <= known and first in arguments:
            return state, kind(**arguments), checkpoint
    if not arguments:
        raise UserError(
            f"--checkpoint {checkpoint} does not name its model, because its module did not "
            "call save_hyperparameters()"
        )
    raise UserError(
        f"--checkpoint {checkpoint} has no LitGPT and no LitCausalLM (its settings are "
        f"{', '.join(sorted(arguments))}), so it cannot generate text"
    )


def _state(checkpoint: str) -> Mapping[str, Any]:
    """Return the state of one of our checkpoints or of a Lightning checkpoint."""
    check_checkpoint("--checkpoint", checkpoint)
    if located(checkpoint).is_dir():
        return read_state(checkpoint)
    try:
        return open_state_dict(checkpoint)[1]
    except CheckpointError as error:
        raise UserError(
            f"--checkpoint {checkpoint} is not a Lightning checkpoint ({error})"
        ) from error


def _timed(
    trainer: Trainer,
    module: LightningModule,
    row: list[int],
    sampling: Sampling,
    tokenizer: TextTokenizer,
) -> list[int]:
    limit = longest_sequence(module)
    started = time.perf_counter()
    if trainer.is_global_zero and limit is not None and len(row) > limit:
        print(
            f"(the model accepts {limit} tokens and ignores the first {len(row) - limit})",
            file=sys.stderr,
            flush=True,
        )
    (written,) = generate(module, [row], sampling, eos_ids=tokenizer.eos_ids)
    if trainer.is_global_zero and written:
        speed = len(written) / (time.perf_counter() - started)
        print(
            f"({min(len(row), limit or len(row))} tokens read, {len(written)} generated, "
            f"{speed:.3g} per second)",
            file=sys.stderr,
            flush=True,
        )
    return written


def _own_input() -> TextIO:
    """Return the standard input, or an empty one if the process has none.

    Python closes ``sys.stdin`` in a forked process. A duplicate of its descriptor remains open.
    """
    if sys.stdin is None:
        return io.StringIO()
    try:
        return os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # a program has replaced sys.stdin
        return sys.stdin


def _lines(source: TextIO) -> _Lines:
    """Return a queue of the input's lines as they arrive, with None at the end of the input."""
    lines: _Lines = queue.SimpleQueue()

    def read() -> None:
        for line in source:
            if line.strip():
                lines.put(line.strip())
        lines.put(_END)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _stopper(lines: _Lines) -> Callable[[int, object], None]:
    """Return a signal handler that stops the chat after the current answer.

    A second signal of the same kind ends the chat at once.
    """
    received: list[int] = []

    def stop(number: int, _frame: object) -> None:
        if number in received:  # the parent of a forked process passes Ctrl-C on as SIGTERM
            raise KeyboardInterrupt
        received.append(number)
        while not lines.empty():
            lines.get_nowait()
        lines.put(_END)

    return stop


def _next(trainer: Trainer, lines: _Lines) -> str | None:
    """Return the next question on all ranks, or None at the end of the input; collective."""
    if trainer.is_global_zero and sys.stdin is not None and sys.stdin.isatty():
        print("> ", end="", flush=True)
    return next_of_rank_zero(trainer, lines)


def next_of_rank_zero(trainer: Trainer, items: queue.SimpleQueue[_T]) -> _T:
    """Return the next item of rank 0's queue on all ranks; collective.

    Rank 0 sends messages while it waits, so that the other ranks do not treat it as lost.
    """
    while True:
        arrived = True
        item = None
        if trainer.is_global_zero:
            try:
                item = items.get(timeout=_HEARTBEAT_S)
            except queue.Empty:
                arrived = False
        arrived, item = trainer.strategy.broadcast((arrived, item))
        if arrived:
            return item
