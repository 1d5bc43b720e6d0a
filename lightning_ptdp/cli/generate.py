"""The verbs ``ptdp generate`` and ``ptdp chat``: text generation in any layout.

The model is a checkpoint or a Hugging Face folder.
"""

from __future__ import annotations

import inspect
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TypeVar

from jsonargparse import ArgumentParser

from lightning_ptdp.base.option_types import Size, check_types
from lightning_ptdp.generation import Sampling

_T = TypeVar("_T")


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


SHORT_OPTIONS = {"-t": "--tensor_parallel_size", "-p": "--pipeline_parallel_size"}
_DESCRIPTIONS = {
    "generate": "Continue a text with a trained checkpoint or a Hugging Face model, on one "
    "process or split over several (-t 2 -p 2).",
    "chat": "Chat with an instruction model, on one process or split over several (-t 2 -p "
    "2). Each line is a question, /new starts a new conversation, and the end of the "
    "input (Ctrl-D) ends. Questions may be piped.",
}


def parse_serving(
    verb: str, description: str, arguments: list[str], kind: type[_T]
) -> tuple[ServingOptions, _T]:
    """Return the options for model, layout and device, and the verb's options of class ``kind``."""
    parser = ArgumentParser(prog=f"ptdp {verb}", description=description)
    parser.add_class_arguments(ServingOptions, as_group=False)
    parser.add_class_arguments(kind, as_group=False)
    words = [SHORT_OPTIONS.get(argument, argument) for argument in arguments]
    args = vars(parser.parse_args(words))
    serving = ServingOptions(
        **{field.name: args.pop(field.name) for field in fields(ServingOptions)}
    )
    return serving, kind(**args)


def run(verb: str, arguments: list[str]) -> int:
    """Parse the command line and generate text."""
    kind: type[SampleOptions | ChatOptions] = ChatOptions if verb == "chat" else SampleOptions
    serving, options = parse_serving(verb, _DESCRIPTIONS[verb], arguments, kind)

    from lightning_ptdp.cli.serving import Chat, Continuation, module_of, serve
    from lightning_ptdp.generation.tokenizer_text import find_tokenizer

    with tempfile.TemporaryDirectory() as scratch:
        state, module, ckpt_path = module_of(serving.checkpoint, Path(scratch))
        tokenizer = find_tokenizer(state, serving.tokenizer)
        writer = (
            Chat(tokenizer, options, system=options.system)
            if isinstance(options, ChatOptions)
            else Continuation(tokenizer, options, prompt=options.prompt)
        )
        serve(module, writer, serving, ckpt_path=ckpt_path)
    return 0
