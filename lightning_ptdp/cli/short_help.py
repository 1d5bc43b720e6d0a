"""The short help of configured verbs: the most common options, printed within a second.

Importing the classes would import Lightning, which takes many seconds. Arguments and their
descriptions are therefore read from the source files.
"""

from __future__ import annotations

import ast
import functools
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
_OPTIMIZER = (
    "optimizer.learning_rate",
    "optimizer.warmup_steps",
    "optimizer.decay_steps",
    "optimizer.weight_decay",
)
_HUGGING_FACE = (
    "path",
    "config",
    "pretrained",
    "dtype",
    "attention",
    "adapter",
    "adapter.r",
    "adapter.alpha",
    "adapter.dropout",
    "adapter.target_modules",
    "adapter.modules_to_save",
    *_OPTIMIZER,
)
_STREAM = (
    "sequence_length",
    "validation_samples",
    "seed",
    "num_workers",
    "micro_batch_size",
    "num_microbatches",
    "global_batch_size",
)
_CHAT = (
    "tokenizer_dir",
    "data_dir",
    "chat_template",
    "too_long",
    "faulty",
    "validation_path",
    *_STREAM,
)
_SHOWN: Mapping[str, Sequence[str]] = {
    "LitGPT": (
        "config.vocabulary_size",
        "config.sequence_length",
        "config.num_layers",
        "config.hidden_size",
        "config.num_heads",
        "config.num_kv_heads",
        "config.dropout",
        *_OPTIMIZER,
    ),
    "LitCausalLM": _HUGGING_FACE,
    "LitDPO": ("beta", "label_smoothing", "reference", *_HUGGING_FACE),
    "LitImageTextToText": _HUGGING_FACE,
    "LitMaskedLM": _HUGGING_FACE,
    "TextDataModule": ("data_dir", "source", "vocabulary_size", "tokenizer_dir", *_STREAM),
    "ChatDataModule": ("path", "columns", "learn", "packing", *_CHAT),
    "ImageChatDataModule": ("path", "max_images", *_CHAT),
    "PreferenceDataModule": ("path", "columns", *_CHAT),
    "MixtureDataModule": ("corpora", "vocabulary_size", "verify_hashes", *_STREAM),
    "IndexedDataModule": (
        "data_prefix",
        "vocabulary_size",
        "validation_prefix",
        "validation_fraction",
        "verify_tokens",
        *_STREAM,
    ),
}
"""Class -> the keys that its help shows."""
_OWNERS = {"config": "GPTConfig", "optimizer": "AdamWConfig", "adapter": "LoraOptions"}
"""Prefix of keys -> class that describes them."""


@dataclass(frozen=True, kw_only=True)
class SourceOption:
    """An argument as written in the source.

    Attributes:
        default: Source of its default; "" if the argument is required.
        text: Description in the docstring of its class.
    """

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
        f"others:\n{_rows('PTDPConfig')}",
        _class_part("model", _chosen("model", arguments) or "LitGPT", "my_module.LitMine"),
        _class_part("data", _chosen("data", arguments) or "TextDataModule", "my_module.MyData"),
    ]
    return "\n\n".join(parts)


def options_in_source(name: str) -> dict[str, SourceOption]:
    """Return the arguments of a class of this package and of its bases, by name.

    The arguments are the fields of a dataclass, else those of ``__init__``.
    """
    defaults: dict[str, str] = {}
    texts: dict[str, str] = {}
    for node in _with_bases(name):
        docstring = ast.get_docstring(node) or ""
        for other in re.findall(r"``(\w+)`` documents the arguments", docstring):
            texts |= _argument_texts(ast.get_docstring(_definition(other)) or "")
        defaults |= dict(_arguments(node))
        texts |= _argument_texts(docstring)
    return {
        key: SourceOption(default=default, text=texts.get(key, ""))
        for key, default in defaults.items()
    }


def _with_bases(name: str) -> Iterator[ast.ClassDef]:
    """Yield the definition of a class after those of its bases in this package."""
    if name in _class_files():
        node = _definition(name)
        for base in node.bases:
            yield from _with_bases(ast.unparse(base))
        yield node


def _definition(name: str) -> ast.ClassDef:
    source = _class_files()[name].read_text(encoding="utf-8")
    return next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )


@functools.cache  # installed files do not change
def _class_files() -> Mapping[str, Path]:
    """Return the source file of every class; names of classes are unique in the package."""
    files = {}
    for file in _PACKAGE.rglob("*.py"):
        for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            files[name] = file
    return files


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


def _argument_texts(docstring: str) -> dict[str, str]:
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


def _class_part(part: str, name: str, example: str) -> str:
    """Return the keys of a class, or how to list them if the class is not ours."""
    if name in _SHOWN:
        return f"--{part}.NAME VALUE, of {name}; your own class: --{part} {example}:\n{_rows(name)}"
    return f"--{part}.NAME VALUE, of {name}: --{part}.help {name} lists all"


def _rows(name: str) -> str:
    """Return a table of the keys of a class, all of them unless ``_SHOWN`` selects some."""
    own = options_in_source(name)
    options = options_in_source("BatchOptions") | own  # data modules pass arguments on to it
    for prefix, owner in _OWNERS.items():
        for key, option in options_in_source(owner).items():
            options[f"{prefix}.{key}"] = option
    shown = [(key, options[key]) for key in _SHOWN.get(name, own)]
    return _table([(key, _default(option.default), _first(option.text)) for key, option in shown])


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
