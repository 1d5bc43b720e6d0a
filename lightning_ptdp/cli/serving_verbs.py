"""The verbs ``ptdp generate``, ``ptdp chat`` and ``ptdp evaluate``, for a model in any layout.

The model is a checkpoint or a Hugging Face folder.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser

from lightning_ptdp.base.option_types import Count, Size, check_types
from lightning_ptdp.cli.command_line import check_output, listed
from lightning_ptdp.generation import Sampling


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Model, layout and device for text generation.

    Args:
        checkpoint: A checkpoint of ptdp fit in any layout, a Lightning checkpoint, a Hugging Face
            folder, or a folder of peft's LoRA adapters. The base model of adapters is read from the
            place that they name.
        tokenizer: Folder of the tokenizer; null: that of the checkpoint or of the Hugging Face
            folder.
        tensor_parallel_size: t, ranks that share one layer's matrices; short form -t.
        pipeline_parallel_size: p, ranks that share the layers; short form -p.
        accelerator: cpu or gpu; auto: gpu if torch sees one.
        precision: Precision of weights and arithmetic, as for the Trainer.
        start_method: How the t * p processes are started; fork is fast, and only for CPUs.
    """

    checkpoint: str
    tokenizer: str | None = None
    tensor_parallel_size: Size = 1
    pipeline_parallel_size: Size = 1
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    precision: str = "32-true"
    start_method: Literal["popen", "fork"] = "popen"

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class SampleOptions(Sampling):
    __doc__ = f"{inspect.cleandoc(Sampling.__doc__ or '')}\n    prompt: Text to continue."

    prompt: str = "def "


@dataclass(frozen=True, kw_only=True)
class ChatOptions(Sampling):
    __doc__ = f"{inspect.cleandoc(Sampling.__doc__ or '')}\n    system: System prompt."

    system: str | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Tasks and their options.

    Args:
        tasks: Names of tasks or groups, separated by commas.
        include_path: Folder with the YAML files of further tasks.
        num_fewshot: Number of examples in each prompt; null: that of the task.
        limit: Number of samples of each task, or their share if it is below 1; null: all.
        batch_size: Number of sequences in a forward.
        apply_chat_template: Put each prompt into the tokenizer's chat template.
        log_samples: Also write the answer to each sample to the output.
        output: JSON file for the results, in the harness's format.
    """

    tasks: str
    include_path: str | None = None
    num_fewshot: Count | None = None
    limit: float | None = None
    batch_size: Size = 8
    apply_chat_template: bool = False
    log_samples: bool = False
    output: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.limit is not None and self.limit <= 0:
            raise ValueError(
                f"limit={self.limit:g} must be greater than 0. Use null for all samples"
            )


SHORT_OPTIONS = {"-t": "--tensor_parallel_size", "-p": "--pipeline_parallel_size"}
_DESCRIPTIONS = {
    "generate": "Continue a text with a trained checkpoint or a Hugging Face model, on one "
    "process or split over several (-t 2 -p 2).",
    "chat": "Chat with an instruction model, on one process or split over several (-t 2 -p "
    "2). Each line is a question, /new starts a new conversation, and the end of the "
    "input (Ctrl-D) ends. Questions may be piped.",
    "evaluate": """\
Evaluate a trained checkpoint or a Hugging Face model with tasks of lm-evaluation-harness, on one process or split over several (-t 2 -p 2).
The tokenizer and the requests are those of the harness with the exported folder, and so are the results.
Data are loaded before a process is started.""",
}
_OPTIONS: Mapping[str, type[SampleOptions | ChatOptions | EvaluationOptions]] = {
    "generate": SampleOptions,
    "chat": ChatOptions,
    "evaluate": EvaluationOptions,
}


def run(verb: str, arguments: list[str]) -> int:
    """Parse the command line, and use the model in its layout."""
    parser = ArgumentParser(prog=f"ptdp {verb}", description=_DESCRIPTIONS[verb])
    parser.add_class_arguments(ServingOptions, as_group=False)
    parser.add_class_arguments(_OPTIONS[verb], as_group=False)
    words = [SHORT_OPTIONS.get(argument, argument) for argument in arguments]
    args = vars(parser.parse_args(words))
    serving = ServingOptions(
        **{field.name: args.pop(field.name) for field in fields(ServingOptions)}
    )
    options = _OPTIONS[verb](**args)
    if isinstance(options, EvaluationOptions):
        from lightning_ptdp.base.requirements import check_installed

        check_installed("lm-eval", "accelerate", "transformers")
        check_output(options.output)

    from lightning_ptdp.cli.serving import module_of, serve
    from lightning_ptdp.generation.tokenizer_text import find_tokenizer

    with tempfile.TemporaryDirectory() as scratch:
        state, module, ckpt_path = module_of(serving.checkpoint, Path(scratch))
        writer = _writer(options, find_tokenizer(state, serving.tokenizer), serving.checkpoint)
        serve(module, writer, serving, ckpt_path=ckpt_path)
    return 0


def _writer(
    options: SampleOptions | ChatOptions | EvaluationOptions,
    tokenizer: Any,
    checkpoint: str,
) -> Any:
    """Return the callback that uses the model.

    Its type is not imported, because jsonargparse also runs a module's imports for type checkers.
    """
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from lightning_ptdp.cli.evaluation import Evaluation
    from lightning_ptdp.cli.serving import Chat, Continuation

    if isinstance(options, SampleOptions):
        return Continuation(tokenizer, options, prompt=options.prompt)
    if isinstance(options, ChatOptions):
        return Chat(tokenizer, options, system=options.system)
    tasks = []
    if rank_zero_only.rank == 0:  # the other ranks do not use the harness
        from lightning_ptdp.cli.harness import load_tasks

        tasks = load_tasks(listed(options.tasks), options.include_path)
    return Evaluation(tasks=tasks, tokenizer=tokenizer, options=options, checkpoint=checkpoint)
