"""The options of the configured verbs that are not Lightning's.

The parser, the short help and the completions all read this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


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
    "fit": "Train a model. Prepares the data first, validates at the end, and prints the "
    "paths of all results.",
    "validate": "Evaluate a checkpoint (--ckpt_path) on the validation data.",
    "test": "Evaluate a checkpoint (--ckpt_path) with the module's test_step.",
    "predict": "Write the output of predict_step for every validation sample as JSON lines: "
    "loss and perplexity of a GPT, tokens of a BERT.",
    "bench": "Measure training steps of a configuration: real steps on random tokens, without "
    "loggers, callbacks and validation.",
    "verify": "Compare some training steps of a configuration with one process, and explain "
    "differences. The exit code is 0 if they are equal.",
    "prepare": "Create the tokenizer and the token chunks of a configuration's data, without "
    "training.",
}
CONFIGURED = tuple(DESCRIPTIONS)

_CKPT_PATH = VerbOption(
    name="ckpt_path",
    type=str | None,
    text="Checkpoint to resume from (fit: with the complete training state) or to evaluate.",
)
_OPTIONS = {
    "fit": (
        VerbOption(
            name="resume",
            type=Literal["auto"] | None,
            text="auto: resume from the newest complete checkpoint of this experiment in the "
            "configuration's folders (trainer.default_root_dir, the loggers' and "
            "ModelCheckpoint's). If there is none, start a new training, or resume from "
            "--ckpt_path if it is set.",
        ),
        VerbOption(
            name="init_from",
            type=str | None,
            text="Checkpoint or Hugging Face folder with the initial weights, as for "
            "fine-tuning. For other names use the callback InitFrom.",
        ),
        VerbOption(
            name="export",
            type=str | None,
            text="Hugging Face folder to export to at the end, written by all ranks together. "
            "To export every checkpoint or another dtype, use the callback ExportHuggingFace.",
        ),
    ),
    "predict": (
        VerbOption(
            name="output",
            type=str | None,
            text="Output file with one line per sample; null to print the lines.",
        ),
    ),
    "verify": (
        VerbOption(name="steps", type=int, default=3, text="Number of compared optimizer steps."),
        VerbOption(
            name="blocks",
            type=int | None,
            text="Number of blocks of the model to keep; null for as many as one process can hold.",
        ),
        VerbOption(
            name="limit_s",
            type=float,
            default=600.0,
            text="Time limit of each training in seconds.",
        ),
        VerbOption(name="output", type=str | None, text="File for a plot (.png) of the errors."),
    ),
    "bench": (
        VerbOption(
            name="warmup", type=int, default=3, text="Steps before the measured ones; at least 1."
        ),
        VerbOption(name="steps", type=int, default=10, text="Number of measured steps."),
        VerbOption(
            name="peak_tflops",
            type=float | None,
            text="TFLOP/s of one device, for MFU; null for those of its data sheet.",
        ),
        VerbOption(
            name="compare",
            type=str | None,
            text="Additional layouts, separated by commas, such as 't2 p2, p4 v2', with the "
            "same number of samples per step where possible. Sizes that are not named "
            "are 1; data parallelism uses the remaining devices.",
        ),
        VerbOption(name="json", type=None, default=False, text="Print the output as JSON."),
    ),
}


def options_of_verb(verb: str) -> tuple[VerbOption, ...]:
    """Return the verb's own options in the order of its help."""
    return (_CKPT_PATH, *_OPTIONS.get(verb, ()))
