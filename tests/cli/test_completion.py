"""Shell completion."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ptdp.cli.completion import complete
from lightning_ptdp.cli.config_files import recipe_names
from lightning_ptdp.cli.entry import VERBS


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("va", ["validate"]),
        ("fit --config gpt/megatron-1", ["gpt/megatron-1.2b"]),
        ("recipes show bert/n", ["bert/nano"]),
        ("plan --recipe llama", []),
        ("recipes s", ["show"]),
        ("ckpt ", ["inspect", "reshard", "verify"]),
        ("doctor --ba", ["--backend"]),
        ("ckpt verify --he", ["--help"]),
        ("fit --trainer.max_s", ["--trainer.max_steps"]),
        ("fit --model.config.num_l", ["--model.config.num_layers"]),
        ("fit --config bert/nano --data.pai", ["--data.pairs"]),
        ("fit --config nothing --res", ["--resume"]),
        ("fit --launcher s", ["skypilot", "slurm"]),
        ("fit --ckpt_path x", []),
        ("fti --config ", []),
        ("fit --config = gpt/megatron-1", ["gpt/megatron-1.2b"]),  # as bash splits it
        ("fit --config =", recipe_names()),
        ("fit --config = bert/nano --data.pai", ["--data.pairs"]),
        ("fit --config=gpt/megatron-1", ["--config=gpt/megatron-1.2b"]),
        ("convert ", []),  # a file
        ("generate --checkpoint ", []),
    ],
)
def test_completion_offers_matching_words(line, offered):
    assert (
        complete([*shlex.split(line), ""] if line.endswith(" ") else shlex.split(line)) == offered
    )


def test_completed_options_are_listed_in_help(ptdp):
    for verb in VERBS:
        assert "--help" in complete([verb, "--"])
    for verb in ("fit", "predict", "bench"):
        known = set(re.findall(r"--[\w.]+", ptdp(verb, "--help", "all")[1]))
        own = {option for option in complete([verb, "--"]) if "." not in option}
        assert own - known <= {"--debug", "--launcher", "--seed_everything"}


def test_bash_completion_does_not_import_torch(tmp_path):
    command = tmp_path / "ptdp"
    check = 'assert "torch" not in sys.modules'
    code = (
        f"import sys; from lightning_ptdp.cli import main; code = main(); {check}; sys.exit(code)"
    )
    command.write_text(
        f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$@"\n'
    )
    command.chmod(0o755)
    script = """
    eval "$(ptdp completion bash)"
    COMP_WORDS=(ptdp fit --config gpt/124) COMP_CWORD=3; _ptdp; echo "${COMPREPLY[@]}"
    COMP_WORDS=(ptdp recipes --) COMP_CWORD=2; _ptdp; echo "${COMPREPLY[@]}"
    COMP_WORDS=(ptdp "") COMP_CWORD=1; _ptdp; echo "${COMPREPLY[@]}"
    complete -p ptdp
    """
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        ["bash", "-c", script], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "gpt/124m",
        "--help",
        " ".join(sorted([*VERBS, "--help", "--version"])),
        "complete -o default -F _ptdp ptdp",
    ], done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_printed(ptdp, shell):
    code, out, _ = ptdp("completion", shell)
    assert (code, "ptdp completion words -- " in out) == (0, True)
