"""The options of the configured verbs that are not Lightning's.

The parser, the short help and the completions all read this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class VerbOption:
    """An option ``--name``.

    Attributes:
        name: Name without dashes.
        type: Type of its value; None if the option takes no value.
        text: Text of the help.
        default: Value if the option is not given.
    """

    name: str
    type: Any
    text: str
    default: object = None


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
    "ckpt_path",
    str | None,
    "Checkpoint to resume from (fit: with the complete training state) or to evaluate.",
)
_OPTIONS = {
    "fit": (
        VerbOption(
            "resume",
            Literal["auto"] | None,
            "auto: resume from the newest complete checkpoint of this experiment in the "
            "configuration's folders (trainer.default_root_dir, the loggers' and "
            "ModelCheckpoint's). If there is none, start a new training, or resume from "
            "--ckpt_path if it is set.",
        ),
        VerbOption(
            "init_from",
            str | None,
            "Checkpoint or Hugging Face folder with the initial weights, as for "
            "fine-tuning. For other names use the callback InitFrom.",
        ),
        VerbOption(
            "export",
            str | None,
            "Hugging Face folder to export to at the end, written by all ranks together. "
            "To export every checkpoint or another dtype, use the callback ExportHuggingFace.",
        ),
    ),
    "predict": (
        VerbOption(
            "output", str | None, "Output file with one line per sample; null to print the lines."
        ),
    ),
    "verify": (
        VerbOption("steps", int, "Number of compared optimizer steps.", 3),
        VerbOption(
            "blocks",
            int | None,
            "Number of blocks of the model to keep; null for as many as one process can hold.",
        ),
        VerbOption("limit_s", float, "Time limit of each training in seconds.", 600.0),
        VerbOption("output", str | None, "File for a plot (.png) of the errors."),
    ),
    "bench": (
        VerbOption("warmup", int, "Steps before the measured ones; at least 1.", 3),
        VerbOption("steps", int, "Number of measured steps.", 10),
        VerbOption(
            "peak_tflops",
            float | None,
            "TFLOP/s of one device, for MFU; null for those of its data sheet.",
        ),
        VerbOption(
            "compare",
            str | None,
            "Additional layouts, separated by commas, such as 't2 p2, p4 v2', with the "
            "same number of samples per step where possible. Sizes that are not named "
            "are 1; data parallelism uses the remaining devices.",
        ),
        VerbOption("json", None, "Print the output as JSON.", False),
    ),
}


def options_of_verb(verb: str) -> tuple[VerbOption, ...]:
    """Return the verb's own options in the order of its help."""
    return (_CKPT_PATH, *_OPTIONS.get(verb, ()))
