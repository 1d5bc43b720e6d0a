"""The options of the configured verbs that are not Lightning's.

The parser, the short help and the completions all read this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["CONFIGURED", "DESCRIPTIONS", "VerbOption", "options_of_verb"]


@dataclass(frozen=True, kw_only=True)
class VerbOption:
    """An option ``--name``.

    Attributes:
        name: Name without dashes.
        type: Type of its value; None if the option takes no value.
        default: Value if the option is not given.
        text: Text of the help.
    """

    name: str
    type: Any
    default: object = None
    text: str


DESCRIPTIONS = {
    "fit": "Train a model. Prepares the data first, validates at the end, and says where "
    "everything is.",
    "validate": "Evaluate a checkpoint (--ckpt_path) on the validation data.",
    "test": "Evaluate a checkpoint (--ckpt_path) with the module's test_step.",
    "predict": "Write what predict_step gives for every validation sample, as JSON lines: a GPT's "
    "loss and perplexity, a BERT's tokens.",
    "bench": "Measure training steps of a configuration: real steps on random tokens, without "
    "loggers, callbacks and validation.",
    "verify": "Compare some training steps of a configuration with one process, and say why they "
    "differ; exit code 0 if they are equal.",
    "prepare": "Make the tokenizer and the token chunks of a configuration's data, without "
    "training.",
}
CONFIGURED = tuple(DESCRIPTIONS)

_CKPT_PATH = VerbOption(
    name="ckpt_path",
    type=str | None,
    text="Checkpoint to continue from (fit: with the whole state of training) or to evaluate.",
)
_OPTIONS = {
    "fit": (
        VerbOption(
            name="resume",
            type=Literal["auto"] | None,
            text="auto: continue from the newest complete checkpoint of this experiment in the "
            "configuration's folders "
            "(trainer.default_root_dir, the loggers' and ModelCheckpoint's); without one, begin, "
            "with --ckpt_path from that checkpoint.",
        ),
        VerbOption(
            name="init_from",
            type=str | None,
            text="Checkpoint or Hugging Face folder whose weights training begins with, as for "
            "fine-tuning; for other names use the "
            "callback InitFrom.",
        ),
        VerbOption(
            name="export",
            type=str | None,
            text="Hugging Face folder to write at the end, by all ranks together; for every "
            "checkpoint or another dtype use the callback "
            "ExportHuggingFace.",
        ),
    ),
    "predict": (
        VerbOption(
            name="output",
            type=str | None,
            text="File to write to, a line a sample; null: the lines are printed.",
        ),
    ),
    "verify": (
        VerbOption(name="steps", type=int, default=3, text="Optimizer steps that are compared."),
        VerbOption(
            name="blocks",
            type=int | None,
            text="Blocks of the model that are kept; null: as many as one process can hold.",
        ),
        VerbOption(
            name="limit_s", type=float, default=600.0, text="Limit of each training, in seconds."
        ),
        VerbOption(name="output", type=str | None, text="Picture (.png) of the errors."),
    ),
    "bench": (
        VerbOption(
            name="warmup", type=int, default=3, text="Steps before the measured ones; at least 1."
        ),
        VerbOption(name="steps", type=int, default=10, text="Steps that are measured."),
        VerbOption(
            name="peak_tflops",
            type=float | None,
            text="Of one device, for MFU; null: the data sheet's.",
        ),
        VerbOption(
            name="compare",
            type=str | None,
            text="More layouts, separated by commas, such as 't2 p2, p4 v2', in steps of as many "
            "samples where "
            "that is possible. Degrees that are not named are 1; data parallelism takes the rest "
            "of the devices.",
        ),
        VerbOption(name="json", type=None, default=False, text="All of it as JSON."),
    ),
}


def options_of_verb(verb: str) -> tuple[VerbOption, ...]:
    """Return the verb's own options in the order of its help."""
    return (_CKPT_PATH, *_OPTIONS.get(verb, ()))
