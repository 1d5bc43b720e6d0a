"""The options of a command line, and checks of their values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from lightning_ptdp.base.option_types import check_writable_folder
from lightning_ptdp.cli.failures import UserError

if TYPE_CHECKING:
    import torch


CONFIG = ("--config", "-c")
_NUMBER = re.compile(r"-[\d.].*")


@dataclass(frozen=True)
class Option:
    """An option with its value, or a positional word.

    Attributes:
        words: The words of the command line, unchanged.
        name: Name of the option with its dashes; "" for a positional word.
        value: Text after "=", or the next word; None if the option has no value.
    """

    words: tuple[str, ...]
    name: str
    value: str | None = None


def options_on(line: Iterable[str]) -> list[Option]:
    """Return the options of a command line, in order."""
    options: list[Option] = []
    for word in line:
        name, equals, value = word.partition("=")
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            options.append(Option((word,), name, value if equals else None))
        elif options and options[-1].name and options[-1].value is None:
            options[-1] = Option((*options[-1].words, word), options[-1].name, word)
        else:
            options.append(Option((word,), ""))
    return options


def listed(text: str) -> list[str]:
    """Return the comma-separated values of ``text``."""
    return [part.strip() for part in text.split(",")]


def positive(text: str) -> int:
    """Return a positive integer."""
    if not text.strip().isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def integers(text: str) -> list[int]:
    """Return comma-separated positive integers."""
    return [positive(part) for part in text.split(",")]


# ---- Options of verbs ----------------------------------------------------------------------------


@dataclass(frozen=True)
class VerbOption:
    """An option ``--name``.

    Attributes:
        name: Name without dashes.
        type: Type of its value, or a function that reads it; None if the option takes no value. An
            option with a list may be repeated.
        text: Text of the help.
        default: Value if the option is not given.
        dest: Name of the parsed value, if it is not that of the option.
        required: Refuse a command line without the option.
    """

    name: str
    type: Any
    text: str
    default: object = None
    dest: str | None = None
    required: bool = False


_METAVARS: Mapping[Any, str] = {
    int: "N",
    positive: "N",
    integers: "N,…",
    float: "X",
    str: "TEXT",
    listed: "A,B,…",
    Path: "PATH",
}


def verb_parser(
    verb: str, description: str, options: Iterable[VerbOption] = (), **settings: Any
) -> argparse.ArgumentParser:
    """Return the parser of a verb with these options.

    Args:
        verb: Name of the verb.
        description: Text above the options in the help.
        options: Options of the verb.
        settings: Further arguments of ``ArgumentParser``.
    """
    parser = argparse.ArgumentParser(
        prog=f"ptdp {verb}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **settings,
    )
    add_options(parser, options)
    return parser


def add_options(
    parser: argparse.ArgumentParser, options: Iterable[VerbOption], *, group: str | None = None
) -> None:
    """Add options to a parser, below the title ``group`` in the help."""
    target = parser if group is None else parser.add_argument_group(group)
    for option in options:
        settings: dict[str, Any] = {
            "dest": option.dest,
            "default": option.default,
            "required": option.required,
            "help": option.text,
        }
        if option.type is None:
            settings |= {"action": "store_true", "default": False}
        elif get_origin(option.type) is Literal:
            settings["choices"] = get_args(option.type)
        elif get_origin(option.type) is list:
            (kind,) = get_args(option.type)
            settings |= {"action": "append", "type": kind, "metavar": _METAVARS[kind]}
        else:
            settings |= {"type": option.type, "metavar": _METAVARS.get(option.type)}
        target.add_argument(f"--{option.name}", **settings)


# ---- Options of the configured verbs that are not Lightning's ----------------------------------
#
# The parser, the short help and the completions all read this table.


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


# ---- Names of dtypes on the command line ---------------------------------------------------------


DTYPE = VerbOption(
    "dtype",
    Literal["float64", "float32", "bfloat16", "float16"],
    "convert the model's floating-point tensors (default: unchanged)",
)


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the torch dtype called ``name``, or None for None."""
    import torch

    return None if name is None else getattr(torch, name)


# ---- Checks of files before the command line writes them -----------------------------------------


_PICTURES = (".png", ".pdf", ".svg")


def check_output(path: str | Path | None) -> None:
    """Check that the file of ``--output`` can be written.

    Raises:
        UserError: It is a folder.
        ValueError: Its folder cannot be made or is not writable.
    """
    if path is None:
        return
    if Path(path).is_dir():
        raise UserError(f"--output {path} is a folder. Give a file in it")
    check_writable_folder(Path(path).absolute().parent, f"--output {path}")


def check_picture(option: str, path: str | Path | None) -> None:
    """Check that a picture can be written.

    Raises:
        UserError: Its suffix is unknown, or its folder does not exist.
        ValueError: The folder is not writable.
    """
    if path is None:
        return
    if Path(path).suffix not in _PICTURES:
        raise UserError(f"{option} {path} must end in {', '.join(_PICTURES)}")
    folder = Path(path).absolute().parent
    if not folder.exists():
        raise UserError(
            f"{option} {path}: {folder} does not exist. Create it, or use another folder"
        )
    check_writable_folder(folder, f"{option} {path}")
