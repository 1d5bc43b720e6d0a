"""The entry point of ``ptdp``: verb dispatch, error messages and exit codes.

Exit codes: 0 success, 1 failure, 2 an error that the user can fix, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from lightning_ptdp.base.garbage_collection import garbage_collection_paused
from lightning_ptdp.base.option_types import nearest
from lightning_ptdp.base.requirements import check_core
from lightning_ptdp.cli.command_line import CONFIGURED
from lightning_ptdp.cli.config_files import resolve_configs
from lightning_ptdp.cli.failures import (
    Terminated,
    UserError,
    explain,
    terminate_on_sigterm,
    users_line,
    worker_failure,
)
from lightning_ptdp.cli.launcher import wants_launcher
from lightning_ptdp.cli.short_help import short_help
from lightning_ptdp.version import __version__

# Verb -> (module with a function run(verb, arguments), summary for --help). Nothing here may import
# torch, because --help must be quick.
_RUN = "lightning_ptdp.cli.run"
_SERVING = "lightning_ptdp.cli.serving_verbs"
VERBS = {
    "fit": (_RUN, "train a model: ptdp fit --config gpt/nano [--trainer.max_steps 20 …]"),
    "validate": (_RUN, "evaluate a checkpoint on the validation data"),
    "test": (_RUN, "evaluate a checkpoint with the module's test_step"),
    "predict": (
        _RUN,
        "score every validation sample with a checkpoint: JSON lines, printed or to --output",
    ),
    "prepare": (_RUN, "create the tokenizer and token chunks of a recipe's data, without training"),
    "generate": (
        _SERVING,
        "continue a text with a checkpoint or a Hugging Face model, in any layout",
    ),
    "chat": (_SERVING, "talk to an instruction model: ptdp chat --checkpoint FOLDER [-t 2 -p 2]"),
    "evaluate": (
        _SERVING,
        "run tasks of lm-evaluation-harness with a checkpoint or a Hugging Face model, in any layout",
    ),
    "convert": (
        "lightning_ptdp.cli.convert",
        "convert to and from Hugging Face folders, state dicts and Lightning's single file",
    ),
    "ckpt": ("lightning_ptdp.cli.checkpoint", "inspect, verify or reshard a checkpoint"),
    "recipes": (
        "lightning_ptdp.cli.recipes",
        "list the installed recipes, or show one and the origin of its values",
    ),
    "plan": (
        "lightning_ptdp.cli.plan",
        "find the best layouts for a model and devices: ptdp plan --recipe gpt/nano --world 8",
    ),
    "timeline": (
        "lightning_ptdp.cli.timeline",
        "draw a schedule: ptdp timeline --pp 4 --vpp 2 --microbatches 8 --output x.png",
    ),
    "verify": (
        _RUN,
        "compare some steps of a layout with one process: ptdp verify --config gpt/nano",
    ),
    "bench": (
        "lightning_ptdp.cli.bench",
        "measure training steps: ptdp bench --config gpt/nano [--compare 't2 p2, p4']",
    ),
    "doctor": (
        "lightning_ptdp.cli.doctor",
        "check the installation, devices, process groups and folders, and measure the links",
    ),
    "completion": (
        "lightning_ptdp.cli.completion",
        'print completions for bash, zsh and fish: eval "$(ptdp completion bash)"',
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ptdp`` and return its exit code.

    Args:
        argv: Arguments after the program's name; None takes them from ``sys.argv``.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if isinstance(sys.stdout, io.TextIOWrapper):  # with any locale
        sys.stdout.reconfigure(errors="replace")
    try:
        with terminate_on_sigterm():
            return _run(arguments)
    except SystemExit as exit_:
        if type(exit_).__name__ == "SIGTERMException":  # Lightning's, raised after a save
            _say("ended by SIGTERM, after saving")
            return 143
        return 130 if isinstance(exit_.__context__, KeyboardInterrupt) else _code(exit_)
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except Terminated:
        _say("ended by SIGTERM")
        return 143
    except BrokenPipeError:  # for example: ptdp recipes list | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _report(error, debug)


def _run(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else "--help"
    if verb in ("-h", "--help", "help"):
        print(_help())
        return 0
    if verb in ("-V", "--version"):
        print(f"lightning-ptdp {__version__}")
        return 0
    if verb not in VERBS:
        raise UserError(
            f"there is no verb {verb!r}{nearest(verb, VERBS)} (ptdp --help lists all verbs)"
        )
    if verb != "doctor":  # doctor reports on all libraries itself
        check_core()
    name = VERBS[verb][0]
    words = arguments[1:]
    if verb == "fit" and wants_launcher(words):
        name = "lightning_ptdp.cli.launcher"
    elif verb in CONFIGURED:
        if {"-h", "--help"} & {*words}:
            if "all" not in words:
                print(short_help(verb, [word for word in words if word not in ("-h", "--help")]))
                return 0
            words = ["--help"]
        # When a rank is lost, torch's C++ code in its peers logs forty stack frames and only then
        # the cause.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # for --model my_module.LitMine; installed modules win
        words = resolve_configs(words)  # before torch is imported, which takes seconds
    with garbage_collection_paused():
        module = importlib.import_module(name)
    return int(module.run(verb, words))


def _help() -> str:
    verbs = "\n".join(f"  {verb:12}{text}" for verb, (_, text) in VERBS.items())
    return f"""usage: ptdp VERB [options]

Pipeline, tensor, sequence and data parallel training (PTD-P) on PyTorch Lightning.

verbs:
{verbs}

options:
  -h, --help     this text; ptdp VERB --help describes a verb, ptdp fit --help all lists every key
  -V, --version  the version
  --debug        with any verb: show the complete traceback of an error

A configuration is a YAML file or the name of a recipe (ptdp recipes list). Every key can be set on the command line,
for example --trainer.max_steps 20. Your own file may extend a recipe with base: gpt/124m and the changed keys.
ptdp recipes show gpt/nano --resolved shows every value and its origin."""


def _report(error: Exception, debug: bool) -> int:
    """Print an error and return its exit code: 2 if the user can fix it, else 1."""
    message = explain(error)
    failure = worker_failure(error)
    if debug or (message is None and failure is None):
        traceback.print_exception(error)
    if message is not None:
        _say(message + users_line("".join(traceback.format_exception(error))))
        return 2
    if failure is not None:
        _say(failure.message)
        return 2 if failure.fixable else 1
    return 1


def _code(exit_: SystemExit) -> int:
    if exit_.code is None or isinstance(exit_.code, int):
        return exit_.code or 0
    _say(str(exit_.code))
    return 1


def _say(message: str) -> None:
    print(f"ptdp: {message}", file=sys.stderr, flush=True)
