"""The verb ``ptdp doctor``: checks of this machine, with a remedy for each failure."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lightning_ptdp.cli.command_line import VerbOption, verb_parser
from lightning_ptdp.cli.config_files import recipe_names
from lightning_ptdp.cli.failures import UserError

_DESCRIPTION = """\
Check the installation, the machine, its devices and the folders. Start processes that form a group, use every collective
of training and measure it. Each result is ok, a warning or failed, with a remedy.

The exit code is 0 if nothing failed, else 1. Everything has a time limit. The output names a rank that hangs."""

_CALIBRATION_S = 120.0


_OPTIONS = (
    VerbOption("devices", int, "processes to start (default 2)", 2, dest="processes"),
    VerbOption("backend", Literal["gloo", "nccl"], "default: nccl if there are as many GPUs"),
    VerbOption("root-dir", Path, "folder for runs (default: the current folder)", Path()),
    VerbOption("tracking-uri", str, "MLflow's store or server, such as http://host:5000"),
    VerbOption("data-dir", Path, "a folder that ptdp prepare wrote"),
    VerbOption(
        "timeout",
        float,
        "time limit of each part in seconds (default 60)",
        60.0,
        dest="timeout_s",
    ),
    VerbOption(
        "calibrate",
        None,
        "instead, measure the speed of the devices for ptdp plan, bench and layout=auto "
        "(in less than two minutes), and write ptdp-machine.json to the current folder",
    ),
    VerbOption("json", None, "print the output as JSON"),
)


def run(verb: str, arguments: list[str]) -> int:
    """Run ``ptdp doctor`` and return 1 if a check failed, else 0.

    Raises:
        UserError: A number is out of range, or the calibration failed.
    """
    args = vars(verb_parser(verb, _DESCRIPTION, _OPTIONS).parse_args(arguments))
    if args["processes"] < 1:
        raise UserError(f"--devices {args['processes']} must be at least 1")
    if args["timeout_s"] <= 0:
        raise UserError(f"--timeout {args['timeout_s']:g} must be greater than 0")

    if args.pop("calibrate"):
        return _calibrate(
            args["processes"], args["backend"], max(args["timeout_s"], _CALIBRATION_S)
        )

    from lightning_ptdp.doctor import Question, Status, as_json, inspect_all, render

    show = as_json if args.pop("json") else render
    inspection = inspect_all(Question(**args), recipes=recipe_names)
    print(show(inspection))
    return 1 if inspection.count(Status.FAILED) else 0


def _calibrate(processes: int, backend: str | None, timeout_s: float) -> int:
    from lightning_ptdp.doctor.calibration import describe
    from lightning_ptdp.doctor.machine_checks import count_gpus
    from lightning_ptdp.doctor.ranks import calibrate_ranks
    from lightning_ptdp.planner import MACHINE_FILE, save_calibration

    chosen = backend or ("nccl" if count_gpus() >= processes else "gloo")
    try:
        device = calibrate_ranks(count=processes, backend=chosen, timeout_s=timeout_s)
        save_calibration(device, MACHINE_FILE)
    except (RuntimeError, OSError) as error:
        raise UserError(f"not calibrated: {error}") from error
    print(f"{describe(device)}\n{MACHINE_FILE}")
    return 0
