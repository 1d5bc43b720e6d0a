"""``ptdp generate`` and ``ptdp chat``: text from a checkpoint, or a Hugging Face folder, in any layout."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from jsonargparse import ArgumentParser

from lightning_ptdp.generation import Sampling
from lightning_ptdp.option_types import Size, check_types

__all__ = ["SampleOptions", "ServingOptions", "run"]


@dataclass(frozen=True, kw_only=True)
class SampleOptions(Sampling):
    __doc__ = f"""{Sampling.__doc__}        prompt: Text to continue.
    """

    prompt: str = "def "


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """What writes, and where.

    Args:
        checkpoint: A checkpoint that ptdp fit wrote, in whatever layout, a Lightning checkpoint, or a Hugging Face folder.
        tokenizer: Folder of the tokenizer; null: the one that the checkpoint names, or of the Hugging Face folder.
        tensor_parallel_size: t, ranks that share one layer's matrices.
        pipeline_parallel_size: p, ranks that share the layers.
        accelerator: cpu or gpu; auto: gpu where torch sees one.
        precision: Of weights and arithmetic, as the Trainer's.
        start_method: How the t * p processes are started; fork is quick, and for the CPU.
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


_SHORT = {"-t": "--tensor_parallel_size", "-p": "--pipeline_parallel_size"}
_DESCRIPTIONS = {
    "generate": "Continue a text with a trained checkpoint or a Hugging Face model, on one process or split over several (-t 2 -p 2).",
    "chat": "Talk to an instruction model, on one process or split over several (-t 2 -p 2): a line is a question, /new begins another "
    "conversation, the end of the input (Ctrl-D) ends. Questions may be piped.",
}


def run(verb: str, arguments: list[str]) -> int:
    """Parse the command line, and write."""
    chats = verb == "chat"
    parser = ArgumentParser(prog=f"ptdp {verb}", description=_DESCRIPTIONS[verb])
    parser.add_class_arguments(ServingOptions, as_group=False)
    if chats:
        parser.add_argument("--system", type=str, help="what the model is told before the conversation")
    parser.add_class_arguments(Sampling if chats else SampleOptions, as_group=False)
    given = vars(parser.parse_args([_SHORT.get(argument, argument) for argument in arguments]))
    options = ServingOptions(**{field.name: given.pop(field.name) for field in fields(ServingOptions)})

    from lightning_ptdp.cli.serving import Chat, Continuation, module_of, serve
    from lightning_ptdp.generation.text import find_tokenizer

    state, module, ckpt_path = module_of(options.checkpoint)
    tokenizer, extra = find_tokenizer(state, options.tokenizer), given.pop("system" if chats else "prompt")
    sampling = Sampling(**given)
    writer = Chat(tokenizer, sampling, system=extra) if chats else Continuation(tokenizer, sampling, prompt=extra)
    serve(module, writer, options, ckpt_path=ckpt_path)
    return 0
