"""Tasks and model of lm-evaluation-harness, on rank 0."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig

from lightning_ptdp.base.errors import one_line
from lightning_ptdp.base.option_types import nearest
from lightning_ptdp.cli.evaluation import Ask, continuations, scores
from lightning_ptdp.cli.failures import UserError
from lightning_ptdp.cli.serving_verbs import EvaluationOptions
from lightning_ptdp.generation import Sampling
from lightning_ptdp.generation.decoders import language_model, longest_sequence
from lightning_ptdp.generation.tokenizer_text import TextTokenizer
from lightning_ptdp.loggers.connection import quiet

_SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def load_tasks(names: Sequence[str], include_path: str | None) -> list[Any]:
    """Load tasks and groups of tasks with their data.

    Raises:
        UserError: A task is unknown, its data cannot be loaded, or it needs options of generation
            that do not exist here.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include_path {include_path} is not a folder")
    with quiet("lm_eval", "huggingface_hub", "datasets"):
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if not {*names} <= {*manager.all_subtasks}:
            manager = TaskManager(include_path=include_path)  # takes many seconds
        for name in names:
            if name not in manager.all_tasks:
                raise UserError(
                    f"--tasks {name}: the harness has no such task"
                    f"{nearest(name, manager.all_tasks)} (--include_path takes the folder of your "
                    "own task's YAML file)"
                )
        return [task for name in names for task in _load(manager, name)]


def _load(manager: TaskManager, name: str) -> list[Any]:
    """Return the task, or the group, or the tasks with the tag ``name``."""
    try:
        loaded = manager.load([name])
    except Exception as error:  # a task may run any code
        raise UserError(
            f"--tasks {name} cannot load its data ({one_line(error) or type(error).__name__}). Data on the Hugging Face Hub need "
            "the network, or an earlier download in this machine's cache"
        ) from error
    for task in loaded["tasks"].values():
        unknown = {*(task.config.generation_kwargs or ())} - {"until", *_SAMPLING, *_LENGTHS}
        if task.OUTPUT_TYPE == "generate_until" and unknown:
            raise UserError(
                f"--tasks {name} generates with {', '.join(sorted(unknown))}, which ptdp does not "
                "support. Evaluate the exported folder with the harness's own model hf"
            )
    return [loaded["groups"][name]] if name in loaded["groups"] else [*loaded["tasks"].values()]


class HarnessModel(HFLM):
    """The harness's model for transformers, whose forwards run on all ranks.

    Args:
        ask: Returns the answers to a job.
        tokenizer: Tokenizer of the model.
        module: The module that answers.
        batch_size: Number of sequences in a forward.
    """

    def __init__(
        self, ask: Ask, tokenizer: TextTokenizer, module: nn.Module, *, batch_size: int
    ) -> None:
        config = getattr(language_model(module), "config", None)
        if not isinstance(config, PretrainedConfig):
            config = PretrainedConfig()
        with quiet("lm_eval"):  # it warns that the model is not loaded by itself
            super().__init__(
                SimpleNamespace(device=torch.device("cpu"), config=config),
                backend="causal",
                tokenizer=tokenizer.of_transformers,
                max_length=longest_sequence(module),
                batch_size=batch_size,
            )
        self._ask = ask

    def get_model_info(self) -> dict[str, object]:
        """Return the name in the results."""
        return {"model": "ptdp"}

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], *_: object, **__: object
    ) -> list[tuple[float, bool]]:
        rows = []
        for _text, context, continuation in requests:
            assert 0 < len(continuation) <= self.max_length, (
                f"a continuation has {len(continuation)} tokens, but the model accepts 1 to "
                f"{self.max_length}"
            )
            tokens = [*context, *continuation][-(self.max_length + 1) :]
            rows.append((tokens, len(continuation)))
        return list(self._ask(partial(scores, rows=rows, batch_size=self.batch_size)))

    def _model_generate(
        self, context: Tensor, max_length: int, stop: Sequence[str], **options: Any
    ) -> Tensor:
        job = partial(
            continuations,
            prompts=[
                row[mask.bool()].tolist()
                for row, mask in zip(context, options["attention_mask"], strict=True)
            ],
            sampling=Sampling(
                max_new_tokens=max_length - context.size(1),
                temperature=options.get("temperature", 1.0) if options["do_sample"] else 0.0,
                top_k=options.get("top_k"),
                top_p=options.get("top_p", 1.0),
            ),
            until=[text for text in stop if text],
        )
        written = [torch.tensor(new, dtype=torch.int64) for new in self._ask(job)]
        padding = self.tokenizer.pad_token_id
        return torch.cat([context, pad_sequence(written, True, padding_value=padding)], dim=1)


def evaluate(
    ask: Ask,
    tokenizer: TextTokenizer,
    module: nn.Module,
    tasks: Sequence[Any],
    options: EvaluationOptions,
    description: Mapping[str, str],
) -> dict[str, Any]:
    """Evaluate loaded tasks and return the harness's results, which contain the description.

    Raises:
        ValueError: The model cannot answer a request.
    """
    limit = options.limit
    try:
        results: dict[str, Any] = simple_evaluate(
            HarnessModel(ask, tokenizer, module, batch_size=options.batch_size),
            model_args=description,
            tasks=list(tasks),
            num_fewshot=options.num_fewshot,
            limit=int(limit) if limit is not None and limit >= 1 else limit,
            batch_size=options.batch_size,
            apply_chat_template=options.apply_chat_template,
            log_samples=options.log_samples,
            task_manager=TaskManager(include_defaults=False),
        )
    except AssertionError as error:  # the harness's own checks of lengths
        raise ValueError(f"--tasks {options.tasks}: {error}") from error
    return results


def report(results: Mapping[str, Any], output: str | None) -> None:
    """Write the results to a file, and print them as tables."""
    if output is not None:
        text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
        Path(output).write_text(f"{text}\n", encoding="utf-8")
    for column in ("results", "groups"):
        if results.get(column):
            print(make_table(results, column).rstrip(), flush=True)
