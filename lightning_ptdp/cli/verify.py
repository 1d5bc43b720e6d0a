"""The verb ``ptdp verify``: a comparison of a layout with one process."""

from __future__ import annotations

from lightning_ptdp.cli.command_line import check_picture
from lightning_ptdp.cli.failures import UserError, held_back
from lightning_ptdp.cli.lightning_cli import PTDPCLI
from lightning_ptdp.cli.run_checks import check_run
from lightning_ptdp.verification import VerificationError, verify


def run(verb: str, arguments: list[str]) -> int:
    """Run ``ptdp verify`` and return 0 if the layout equals one process, else 1.

    Raises:
        ValueError: The configuration cannot work.
    """
    with held_back():
        cli = PTDPCLI(verb, [*arguments, "--trainer.logger=false"])
        config = cli.config
        if not hasattr(cli.trainer.strategy, "config"):
            raise UserError(
                "ptdp verify compares a layout of the ptdp strategy. Use --trainer.strategy ptdp"
            )
        if config.steps < 1:
            raise UserError(f"--steps {config.steps} must be at least 1")
        check_picture("--output", config.output)
        check_run(cli.trainer, cli.model, cli.datamodule, ckpt_path=None, writes=False)
    if cli.datamodule is not None:
        cli.datamodule.prepare_data()
    options = {
        **{key: value for key, value in vars(cli.config_init.trainer).items() if value is not None},
        "devices": cli.trainer.num_devices,
        "strategy": cli.trainer.strategy,
    }
    try:
        report = verify(
            cli.model,
            cli.datamodule,
            steps=config.steps,
            blocks=config.blocks,
            limit_s=config.limit_s,
            **options,
        )
    except VerificationError as error:
        print(f"ptdp verify: {error}", *getattr(error, "__notes__", ()), sep="\n")
        return 1
    print(report)
    if config.output:
        report.draw(config.output)
    return int(not report.equal)
