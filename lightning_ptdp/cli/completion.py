"""The verb ``ptdp completion``: shell completion of verbs, recipes and options.

The shell calls this module at every TAB, so nothing here imports torch. The options of ``fit`` and
the other configured verbs are the keys of the configuration on the line. The options of all other
verbs are read from their ``--help``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Sequence
from types import ModuleType

from lightning_ptdp.cli.command_line import (
    CONFIG,
    CONFIGURED,
    options_of_verb,
    options_on,
    verb_parser,
)
from lightning_ptdp.cli.config_files import find_config, leaves, recipe_names, resolve_config, short
from lightning_ptdp.cli.failures import UserError
from lightning_ptdp.cli.launcher import SCRIPTS

_SCRIPTS = {
    "bash": """\
_ptdp() {
    local IFS=$'\\n'
    COMPREPLY=($(ptdp completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _ptdp ptdp
""",
    "zsh": """\
#compdef ptdp
_ptdp() {
    local -a found
    found=(${(f)"$(ptdp completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then compadd -a found; else _files; fi
}
compdef _ptdp ptdp
""",
    "fish": """\
complete -c ptdp -a '(ptdp completion words -- (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}
_DESCRIPTION = """\
Print the completions of a shell:

  eval "$(ptdp completion bash)"           in ~/.bashrc
  eval "$(ptdp completion zsh)"            in ~/.zshrc, after compinit
  ptdp completion fish | source            in ~/.config/fish/config.fish"""

_EXAMPLE = "gpt/nano"
_CONFIG_OPTIONS = (*CONFIG, "--recipe")
_COMMON = ("--help", "--config", "--print_config", "--debug")
_VALUES = {"--launcher": tuple(SCRIPTS), "--resume": ("auto",)}
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_COMMAND = re.compile(r"^    ([a-z]+)(?: |$)", re.MULTILINE)


def run(verb: str, arguments: list[str]) -> int:
    """Print a shell's script or, when that script asks, the words that complete a line."""
    if arguments[:1] == ["words"]:  # not parsed: argparse would remove a "--" of the line
        print("\n".join(complete(arguments[2:])))
        return 0
    parser = verb_parser(verb, _DESCRIPTION)
    parser.add_argument("shell", choices=(*_SCRIPTS,))
    print(_SCRIPTS[parser.parse_args(arguments).shell])
    return 0


def complete(line: Sequence[str]) -> list[str]:
    """Return the words that complete the last word of ``line``, which may be empty.

    The list is empty where the line takes a file or a free value.
    """
    # bash makes three words of --config=gpt, zsh and fish one.
    *before, current = [word for word in line if word != "="] or [""]
    prefix = ""
    if line[-1:] == ["="]:
        before, current = [*before, current], ""
    elif current.startswith("-") and "=" in current:
        option, _, current = current.partition("=")
        before, prefix = [*before, option], f"{option}="
    words = {word for word in _candidates(before, current) if word.startswith(current)}
    return sorted(prefix + word for word in words)


def _candidates(before: Sequence[str], current: str) -> Sequence[str]:
    from lightning_ptdp.cli.entry import VERBS

    if not before:
        return [*VERBS, "--help", "--version"]
    verb = before[0]
    previous = before[-1]
    if verb not in VERBS:
        return []
    if previous in _CONFIG_OPTIONS or (verb, previous) == ("recipes", "show"):
        return recipe_names()
    if previous in _VALUES:
        return _VALUES[previous]
    if verb in CONFIGURED:
        options = [f"--{option.name}" for option in options_of_verb(verb)] + ["--launcher"] * (
            verb == "fit"
        )
        return [*_COMMON, *options, *_keys(before)] if current.startswith("-") else []
    module = importlib.import_module(VERBS[verb][0])
    commands = _COMMAND.findall(_help(module, verb, []))
    if not current.startswith("-"):
        return commands if len(before) == 1 else []
    return _OPTION.findall(
        _help(module, verb, before[1:2] if before[1:2] and before[1] in commands else [])
    )


def _keys(before: Sequence[str]) -> list[str]:
    """Return the keys of the configuration on the line as options.

    A line without a configuration gets the keys of the recipe ``gpt/nano``.
    """
    configs = [
        option.value
        for option in options_on(before)
        if option.name in _CONFIG_OPTIONS and option.value
    ]
    try:
        values = resolve_config(find_config(configs[-1] if configs else _EXAMPLE)).values
    except UserError:
        return []
    return [f"--{'.'.join(map(str, short(path)))}" for path in leaves(values) if path]


def _help(module: ModuleType, verb: str, command: Sequence[str]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        module.run(verb, [*command, "--help"])
    return output.getvalue()
