"""The verb ``ptdp doctor``: checks of this machine, with a remedy for each failure."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_ptdp.cli.config_files import recipe_names
from lightning_ptdp.cli.failures import UserError

_DESCRIPTION = """\
Check the installation, the machine, its devices and the folders. Start processes that form a group, use every collective
of training and measure it. Each result is ok, a warning or failed, with a remedy.

The exit code is 0 if nothing failed, else 1. Everything has a time limit. The output names a rank that hangs."""

_CALIBRATION_S = 120.0


def parser(verb: str) -> argparse.ArgumentParser:
    """Return the argument parser of ``ptdp doctor``."""
    options = argparse.ArgumentParser(
        prog=f"ptdp {verb}",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "--devices",
        dest="processes",
        type=int,
        default=2,
        metavar="N",
        help="processes to start (default 2)",
    )
    options.add_argument(
        "--backend", choices=("gloo", "nccl"), help="default: nccl if there are as many GPUs"
    )
    options.add_argument(
        "--root-dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder for runs (default: the current folder)",
    )
    options.add_argument(
        "--tracking-uri", metavar="URI", help="MLflow's store or server, such as http://host:5000"
    )
    options.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="a folder that ptdp prepare wrote"
    )
    options.add_argument(
        "--timeout",
        dest="timeout_s",
        type=float,
        default=60.0,
        metavar="S",
        help="time limit of each part in seconds (default 60)",
    )
    options.add_argument(
        "--calibrate",
        action="store_true",
        help="instead, measure the speed of the devices for ptdp plan, bench and layout=auto "
        "(in less than two minutes), and write ptdp-machine.json to the current folder",
    )
    options.add_argument("--json", action="store_true", help="print the output as JSON")
    return options


def run(verb: str, arguments: list[str]) -> int:
    """Run ``ptdp doctor`` and return 1 if a check failed, else 0.

    Raises:
        UserError: A number is out of range.
    """
    args = vars(parser(verb).parse_args(arguments))
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
