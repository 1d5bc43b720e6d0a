"""The short help of configured verbs: the most common options, printed within a second.

Importing the classes would import Lightning, which takes many seconds. Arguments and their
descriptions are therefore read from the source files.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ptdp.cli.command_line import CONFIG, DESCRIPTIONS, options_of_verb, options_on
from lightning_ptdp.cli.config_files import find_config, resolve_config

_PACKAGE = Path(__file__).resolve().parents[1]
_WIDTH = 116
_TRAINER: Mapping[str, str] = {
    "accelerator": "cpu or gpu.",
    "devices": "Processes per machine, one per device.",
    "num_nodes": "Number of machines.",
    "precision": "32-true, bf16-mixed, bf16-true, 16-mixed.",
    "max_steps": "Length of training in optimizer steps.",
    "max_epochs": "Length of training in epochs.",
    "val_check_interval": "Steps between validations, each with a checkpoint.",
    "limit_val_batches": "Batches per validation.",
    "log_every_n_steps": "Steps between logged values.",
    "gradient_clip_val": "Maximum norm of the gradient.",
    "accumulate_grad_batches": "Batches per optimizer step.",
    "logger": "MLFlowLogger, CSVLogger, TensorBoardLogger, or false.",
    "callbacks+": "Additional callback, such as PipelineTimeline.",
    "default_root_dir": "Folder for runs without a logger.",
}
_Shown = tuple[str, str, str, Sequence[str]]
"""Prefix of the keys, file, class, and the fields that are shown; () shows all fields."""

_STRATEGY: Sequence[_Shown] = (("", "config.py", "PTDPConfig", ()),)
_OPTIMIZER: _Shown = (
    "optimizer.",
    "models/optimizer_setup.py",
    "AdamWConfig",
    ("learning_rate", "warmup_steps", "decay_steps", "weight_decay"),
)
_HUGGING_FACE: Sequence[_Shown] = (
    (
        "",
        "models/lit_huggingface.py",
        "LitCausalLM",
        ("path", "config", "pretrained", "dtype", "attention", "adapter"),
    ),
    (
        "adapter.",
        "models/adapters.py",
        "LoraOptions",
        ("r", "alpha", "dropout", "target_modules", "modules_to_save"),
    ),
    _OPTIMIZER,
)
_SIZES = (
    "vocabulary_size",
    "sequence_length",
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "dropout",
)
_MODELS: Mapping[str, Sequence[_Shown]] = {
    "LitGPT": (("config.", "models/model_config.py", "GPTConfig", _SIZES), _OPTIMIZER),
    "LitCausalLM": _HUGGING_FACE,
    "LitDPO": (
        ("", "models/lit_dpo.py", "LitDPO", ("beta", "label_smoothing", "reference")),
        *_HUGGING_FACE,
    ),
    "LitImageTextToText": _HUGGING_FACE,
    "LitMaskedLM": _HUGGING_FACE,
}
_STREAM: Sequence[_Shown] = (
    (
        "",
        "data/stream_datamodule.py",
        "StreamDataModule",
        ("sequence_length", "validation_samples", "seed", "num_workers"),
    ),
    (
        "",
        "data/stream_datamodule.py",
        "BatchOptions",
        ("micro_batch_size", "num_microbatches", "global_batch_size"),
    ),
)
_PREPARED = (
    "tokenizer_dir",
    "data_dir",
    "chat_template",
    "too_long",
    "faulty",
    "validation_path",
)
_CHAT = ("path", "columns", "learn", "packing", *_PREPARED)
_DATA: Mapping[str, Sequence[_Shown]] = {
    "TextDataModule": (
        (
            "",
            "data/datamodule.py",
            "TextDataModule",
            ("data_dir", "source", "vocabulary_size", "tokenizer_dir"),
        ),
        *_STREAM,
    ),
    "ChatDataModule": (("", "data/chat_datamodule.py", "ChatDataModule", _CHAT), *_STREAM),
    "ImageChatDataModule": (
        ("", "data/image_chat_datamodule.py", "ImageChatDataModule", ("path", "max_images")),
        ("", "data/chat_datamodule.py", "ChatDataModule", _PREPARED),
        *_STREAM,
    ),
    "PreferenceDataModule": (
        ("", "data/chat_datamodule.py", "PreferenceDataModule", ("path", "columns")),
        ("", "data/chat_datamodule.py", "ChatDataModule", _PREPARED),
        *_STREAM,
    ),
    "MixtureDataModule": (("", "data/mixture.py", "MixtureDataModule", ()), *_STREAM),
    "IndexedDataModule": (("", "data/indexed_datamodule.py", "IndexedDataModule", ()), *_STREAM),
}


@dataclass(frozen=True, kw_only=True)
class SourceOption:
    """An argument as written in the source.

    Attributes:
        name: Name of the argument.
        default: Source of its default; "" if the argument is required.
        text: Description in the docstring of its class.
    """

    name: str
    default: str
    text: str


def short_help(verb: str, arguments: Sequence[str] = ()) -> str:
    """Return the text of ``ptdp VERB --help``.

    The text lists the keys of the classes that the command line's configuration names.

    Args:
        verb: A verb with a configuration.
        arguments: The command line after the verb.

    Raises:
        UserError: A configuration on the command line cannot be read.
    """
    verb_options = [
        (
            f"--{option.name}",
            "" if option.type is None else _default(repr(option.default)),
            option.text,
        )
        for option in options_of_verb(verb)
    ]
    if verb == "fit":
        verb_options.append(
            (
                "--launcher",
                "",
                "slurm, torchrun, kubernetes or skypilot: start this on many devices; with "
                "--help, its options.",
            )
        )
    general = [
        (
            "-c, --config",
            "",
            "A recipe (ptdp recipes list) or a YAML file; may be repeated, later ones win.",
        ),
        ("--print_config", "", "Print the resulting configuration."),
        (
            "--help all",
            "",
            "All keys, with Lightning's descriptions. For those of a class: --data.help "
            "TextDataModule.",
        ),
    ]
    parts = [
        f"usage: ptdp {verb} --config RECIPE [--KEY VALUE ...]",
        DESCRIPTIONS[verb],
        f"options:\n{_table([*general, *verb_options])}",
        "--trainer.NAME VALUE, of Lightning's Trainer, for "
        f"example:\n{_table([(name, '', text) for name, text in _TRAINER.items()])}",
        "--trainer.strategy.NAME VALUE, with the defaults that apply unless a recipe sets "
        f"others:\n{_rows(_STRATEGY)}",
        _class_part("model", _chosen("model", arguments) or "LitGPT", _MODELS, "my_module.LitMine"),
        _class_part(
            "data", _chosen("data", arguments) or "TextDataModule", _DATA, "my_module.MyData"
        ),
    ]
    return "\n\n".join(parts)


def options_in_source(file: Path, name: str) -> list[SourceOption]:
    """Return the arguments of a class and of its bases.

    The arguments are the fields of a dataclass, else those of ``__init__``. The bases are those in
    the same file, and those that a dataclass imports from a module of this package.
    """
    defaults: dict[str, str] = {}
    texts: dict[str, str] = {}
    for node in _with_bases(file, name):
        defaults |= dict(_arguments(node))
        texts |= _said(ast.get_docstring(node) or "")
    return [
        SourceOption(name=key, default=default, text=texts.get(key, ""))
        for key, default in defaults.items()
    ]


def _with_bases(file: Path, name: str) -> Iterator[ast.ClassDef]:
    """Yield a class after its bases."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    files = dict.fromkeys(classes, file)
    if classes[name].decorator_list:
        for node in body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning_ptdp."):
                source = _PACKAGE.parent.joinpath(*str(node.module).split(".")).with_suffix(".py")
                files |= {alias.name: source for alias in node.names}
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in files:
            yield from _with_bases(files[base.id], base.id)
    yield classes[name]


def _arguments(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for part in node.body:
        if (
            isinstance(part, ast.AnnAssign)
            and isinstance(part.target, ast.Name)
            and node.decorator_list
        ):
            yield part.target.id, "" if part.value is None else ast.unparse(part.value)
        elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
            positional = part.args.args[1:]
            defaults = [
                *[None] * (len(positional) - len(part.args.defaults)),
                *part.args.defaults,
                *part.args.kw_defaults,
            ]
            for argument, default in zip(
                [*positional, *part.args.kwonlyargs], defaults, strict=True
            ):
                yield argument.arg, "" if default is None else ast.unparse(default)


def _said(docstring: str) -> dict[str, str]:
    """Return the descriptions in the ``Args:`` section by argument."""
    block = re.search(r"^Args:\n((?: +.*\n?|\n)+)", docstring, re.MULTILINE)
    entries = re.split(r"^    (?=\w)", block[1], flags=re.MULTILINE)[1:] if block else []
    return {
        name: " ".join(text.split())
        for name, _, text in (entry.partition(":") for entry in entries)
    }


def _chosen(part: str, arguments: Sequence[str]) -> str:
    """Return the name of the model or data class that a command line chooses, or ""."""
    name = ""
    for option in options_on(arguments):
        value: Any = option.value
        if option.name in CONFIG and value is not None:
            value = resolve_config(find_config(value)).values.get(part)
            value = value.get("class_path") if isinstance(value, Mapping) else value
        elif option.name != f"--{part}":
            continue
        name = str(value or name)
    return name.rpartition(".")[2]


def _class_part(part: str, name: str, classes: Mapping[str, Sequence[_Shown]], example: str) -> str:
    """Return the keys of a class, or how to list them if the class is not ours."""
    if name in classes:
        return (
            f"--{part}.NAME VALUE, of {name}; your own class: --{part} {example}:\n"
            f"{_rows(classes[name])}"
        )
    return f"--{part}.NAME VALUE, of {name}: --{part}.help {name} lists all"


def _rows(classes: Sequence[_Shown]) -> str:
    rows = []
    for prefix, file, name, keys in classes:
        options = {option.name: option for option in options_in_source(_PACKAGE / file, name)}
        rows += [
            (prefix + key, _default(options[key].default), _first(options[key].text))
            for key in keys or options
        ]
    return _table(rows)


def _default(source: str) -> str:
    """Return a default as written in YAML, or "" if there is none to show."""
    if source.startswith("_"):  # a constant of the file
        return ""
    return {"None": "", "True": "true", "False": "false", "()": "[]"}.get(source, source.strip("'"))


def _first(text: str) -> str:
    """Return the first sentence of a description."""
    return (
        re.split(r"(?<=[^.]\w[\w)\"'])\.(?: |$)", text.replace("``", ""), maxsplit=1)[0].rstrip(".")
        + "."
    )


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    heads = [f"  {name} {default}".rstrip() for name, default, _ in rows]
    width = min(max(map(len, heads)) + 2, 40)
    lines = []
    for head, (_, _, text) in zip(heads, rows, strict=True):
        first, *continuation = textwrap.wrap(text, _WIDTH - width) or [""]
        lines += (
            [head, " " * width + first] if len(head) + 2 > width else [head.ljust(width) + first]
        )
        lines += [" " * width + line for line in continuation]
    return "\n".join(line.rstrip() for line in lines)
