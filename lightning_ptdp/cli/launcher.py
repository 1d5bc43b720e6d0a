"""The option ``ptdp fit --launcher``, which starts a fit on many devices.

A script for SLURM or torchrun, or a job for Kubernetes, is printed, written to a file or started.
Nothing here imports torch, so the script is ready at once.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_ptdp.cli.command_line import (
    CONFIG,
    VerbOption,
    add_options,
    check_output,
    options_on,
    verb_parser,
)
from lightning_ptdp.cli.config_files import load_yaml, merged_values
from lightning_ptdp.cli.failures import UserError
from lightning_ptdp.cli.launch_scripts import (
    LaunchJob,
    kubernetes_job,
    skypilot_task,
    slurm_script,
    torchrun_script,
)
from lightning_ptdp.world.layout import ParallelLayout

_DESCRIPTION = """\
Write a script that trains on many devices, and start it. All other options are those of ptdp fit and are written into the script.

slurm: one task per device; the job saves before it is preempted, is requeued and continues (--resume auto).
torchrun: on every node; after a failure all processes are restarted and continue.
kubernetes: a TrainJob of Kubeflow Trainer 2; recipes and files must be in the container image.
skypilot: a task for "sky launch FILE" or "sky jobs launch FILE", which restarts it after a preemption."""

SCRIPTS = {
    "slurm": slurm_script,
    "torchrun": torchrun_script,
    "kubernetes": kubernetes_job,
    "skypilot": skypilot_task,
}
_SUBMITS = {"slurm": ["sbatch"], "kubernetes": ["kubectl", "create", "--filename=-"]}
_CORES = 8
_TIME = re.compile(r"\d+(:\d{2}){0,2}|\d+-\d{1,2}(:\d{2}){0,2}|infinite|UNLIMITED")
"""Time formats that sbatch accepts."""


def _time(value: str) -> str:
    if _TIME.fullmatch(value) is None:
        raise ArgumentTypeError(
            f"{value!r} is not a time of sbatch. Use minutes, H:MM:SS or D-HH:MM:SS"
        )
    return value


_OPTIONS = (
    VerbOption(
        "launcher",
        Literal["slurm", "torchrun", "kubernetes", "skypilot"],
        "program that starts the processes",
        required=True,
    ),
    VerbOption("dry-run", None, "print the script without starting it"),
    VerbOption("output", Path, "write the script to this file without starting it"),
    VerbOption("nodes", int, "machines (default: trainer.num_nodes)"),
    VerbOption(
        "gpus-per-node",
        int,
        "devices, and processes, per machine (default: trainer.devices)",
    ),
    VerbOption("cpus-per-task", int, f"cores per process (default {_CORES}, on CPU 1)"),
    VerbOption("job-name", str, "name of the job (default: that of the configuration)"),
)
# launchers -> their options
_OWN_OPTIONS: Mapping[tuple[str, ...], Sequence[VerbOption]] = {
    ("slurm",): (
        VerbOption("partition", str, "partition of the cluster"),
        VerbOption("account", str, "account that is charged"),
        VerbOption("time", _time, "time limit of the job: minutes, H:MM:SS or D-HH:MM:SS"),
        VerbOption("sbatch", list[str], "another option of sbatch, as --sbatch=--qos=high"),
    ),
    ("torchrun",): (
        VerbOption("max-restarts", int, "restarts after failures (default 3)", 3),
        VerbOption(
            "rdzv-endpoint",
            str,
            "HOST:PORT at which nodes connect (default: $MASTER_ADDR:$MASTER_PORT)",
        ),
    ),
    ("kubernetes", "skypilot"): (
        VerbOption("image", str, "container image with this package (default: the runtime's)"),
    ),
    ("skypilot",): (VerbOption("gpu-type", str, "SkyPilot's GPUs, such as A100"),),
    ("kubernetes",): (
        VerbOption(
            "runtime",
            str,
            "Kubeflow's ClusterTrainingRuntime (default torch-distributed)",
            "torch-distributed",
        ),
    ),
}


def wants_launcher(arguments: Sequence[str]) -> bool:
    """Return True if a command line of ``ptdp fit`` asks for a script."""
    return any(option.name == "--launcher" for option in options_on(arguments))


def run(verb: str, arguments: list[str]) -> int:
    """Print, write or run the script, and return the exit code.

    The exit code is that of torchrun, sbatch or kubectl if the script is run.

    Raises:
        UserError: There is no configuration, or the machine has no sbatch or kubectl.
        ValueError: The layout does not fit the devices, or --output cannot be written.
    """
    parser = verb_parser(verb, _DESCRIPTION, _OPTIONS, allow_abbrev=False)
    for launchers, own_options in _OWN_OPTIONS.items():
        add_options(parser, own_options, group=", ".join(launchers))
    options, fit_args = parser.parse_known_args(arguments)
    _check_launcher(options)
    check_output(options.output)
    script = SCRIPTS[options.launcher](_job(options, fit_args))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(script, encoding="utf-8")
        options.output.chmod(0o755)
        print(f"written: {options.output}")
        return 0
    if options.dry_run:
        print(script, end="")
        return 0
    if options.launcher in _SUBMITS:
        return _submit(script, _SUBMITS[options.launcher])
    # The child also receives Ctrl-C from the terminal, and ends its workers.
    return subprocess.run(["bash", "-c", script], check=False).returncode


def _check_launcher(options: Namespace) -> None:
    """Check that no option of another launcher is given, and that a task goes to a file."""
    for launchers, own_options in _OWN_OPTIONS.items():
        for option in own_options:
            value = getattr(options, option.name.replace("-", "_"))
            if options.launcher not in launchers and value != option.default:
                raise UserError(
                    f"--{option.name} is an option of --launcher {' and '.join(launchers)}. "
                    f"Leave it out with --launcher {options.launcher}"
                )
    if options.launcher == "skypilot" and not (options.dry_run or options.output):
        raise UserError(
            "--launcher skypilot writes a task. Add --output FILE, then: sky launch FILE"
        )


def _submit(script: str, command: Sequence[str]) -> int:
    if shutil.which(command[0]) is None:
        raise UserError(
            f"there is no {command[0]} on this machine. Run this where {command[0]} is installed, "
            "or print the script with --dry-run"
        )
    return subprocess.run(command, input=script, text=True, check=False).returncode


def _job(options: Namespace, fit_args: list[str]) -> LaunchJob:
    options_of_fit = options_on(fit_args)
    given = {option.name: option.value for option in options_of_fit}
    names = [option.value for option in options_of_fit if option.name in CONFIG and option.value]
    if not names:
        raise UserError(
            "there is no model to train. Use --config with a recipe (ptdp recipes list) or a file"
        )
    name = names[-1]
    config = merged_values(names)
    trainer: Mapping[str, Any] = config.get("trainer") or {}
    devices = _number(
        options.gpus_per_node, "gpus-per-node", given, "trainer.devices", trainer.get("devices")
    )
    nodes = _number(options.nodes, "nodes", given, "trainer.num_nodes", trainer.get("num_nodes", 1))
    strategy = trainer.get("strategy")
    gpus = (given.get("--trainer.accelerator") or trainer.get("accelerator", "auto")) != "cpu"
    is_ours = _check_layout(strategy, given, nodes * devices)
    added = ["--resume=auto"] if is_ours and given.get("--resume") is None else []
    if options.launcher == "slurm":
        # Other processes take these from the launcher's variables. A step of one task may also be
        # a shell that starts processes.
        added = [f"--trainer.num_nodes={nodes}", f"--trainer.devices={devices}", *added]
    slurm = {name: getattr(options, name) for name in ("partition", "account", "time")}
    slurm_options = [f"--{name}={value}" for name, value in slurm.items() if value is not None]
    return LaunchJob(
        arguments=(*fit_args, *added),
        nodes=nodes,
        devices=devices,
        gpus=gpus,
        cpus_per_task=options.cpus_per_task or (_CORES if gpus else 1),
        name=options.job_name or "-".join(Path(name.removesuffix(".yaml")).parts[-2:]).strip("-./"),
        sbatch=(*slurm_options, *(options.sbatch or ())),
        max_restarts=options.max_restarts,
        rendezvous=options.rdzv_endpoint,
        image=options.image,
        runtime=options.runtime,
        gpu_type=options.gpu_type,
    )


def _check_layout(strategy: object, given: Mapping[str, str | None], world_size: int) -> bool:
    """Return True if the strategy is ours, after a check that its degrees fit the devices."""
    chosen = given.get("--trainer.strategy")
    configured = strategy.get("class_path", "") if isinstance(strategy, Mapping) else strategy
    if not str(chosen or configured or "").rpartition(".")[2].startswith(("PTDPStrategy", "ptdp")):
        return False
    options = dict((strategy.get("init_args") or {}) if isinstance(strategy, Mapping) else {})
    for name in ParallelLayout.options():
        value = given.get(f"--trainer.strategy.{name}") or given.get(
            f"--trainer.strategy.init_args.{name}"
        )
        if value is not None:
            options[name] = load_yaml(value)
    ParallelLayout.chosen(options, world_size=world_size)
    return True


def _number(
    option: int | None, name: str, given: Mapping[str, str | None], key: str, configured: object
) -> int:
    """Return a count from the launcher's option, from fit's option or from the configuration."""
    specified = given.get(f"--{key}")
    if option is not None and specified is not None and specified != str(option):
        raise UserError(
            f"--{name} {option} and --{key} {specified} contradict each other. Use only one of them"
        )
    candidates = (option, specified, configured)
    value = next((candidate for candidate in candidates if candidate is not None), None)
    number = int(value) if isinstance(value, int | str) and str(value).isdecimal() else 0
    if number < 1:
        counted = "nodes" if name == "nodes" else "processes"
        raise UserError(
            f"{key}={value!r} is not a number of {counted} for a script. Use --{name} 1 or more"
        )
    return number
