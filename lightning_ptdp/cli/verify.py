"""``ptdp verify``: this module, this data, this layout against one process."""

from __future__ import annotations

import pkgutil
import warnings
from pathlib import Path

from lightning.pytorch.callbacks import Checkpoint

from lightning_ptdp.cli.checks import check_run
from lightning_ptdp.cli.errors import UserError
from lightning_ptdp.cli.held_back import held_back
from lightning_ptdp.cli.lightning_cli import PTDPCLI
from lightning_ptdp.verification import VerificationError, verify

__all__ = ["run"]


class _VerifyCLI(PTDPCLI):
    """A configuration without what writes."""

    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        trainer = self.config.trainer
        trainer.logger, trainer.enable_checkpointing = False, False
        callbacks = trainer.callbacks if isinstance(trainer.callbacks, list) else [trainer.callbacks] if trainer.callbacks else []
        trainer.callbacks = [one for one in callbacks if not issubclass(pkgutil.resolve_name(one.class_path), Checkpoint)]


def run(verb: str, arguments: list[str]) -> int:
    """Run ``ptdp verify``: 0 if the layout is equal to one process, else 1.

    Raises:
        ValueError: The configuration cannot work.
    """
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    with held_back():
        cli = _VerifyCLI(verb, arguments)
        if not hasattr(cli.trainer.strategy, "config"):
            raise UserError("ptdp verify compares a layout of the ptdp strategy: set --trainer.strategy ptdp")
        check_run(cli.trainer, cli.model, cli.datamodule, ckpt_path=None, writes=False)
    output = cli.config.output
    if output is not None and Path(output).suffix != ".png":
        raise UserError(f"--output {output} must end in .png")
    if cli.datamodule is not None:
        cli.datamodule.prepare_data()
    options = {name: value for name, value in vars(cli.config_init.trainer).items() if value is not None}
    options["callbacks"] = [*cli.trainer_defaults.get("callbacks", []), *(options.get("callbacks") or [])]
    try:
        report = verify(
            cli.model,
            cli.datamodule,
            steps=cli.config.steps,
            blocks=cli.config.blocks,
            limit_s=cli.config.limit_s,
            **{**options, "devices": cli.trainer.num_devices, "strategy": cli.trainer.strategy},
        )
    except VerificationError as error:
        print("\n".join([f"ptdp verify: {error}", *getattr(error, "__notes__", ())]), flush=True)
        return 1
    print(report, flush=True)
    if output is not None:
        try:
            report.draw(output)
        except ModuleNotFoundError as error:
            raise UserError(f"--output {output} needs matplotlib: {error}") from error
    return 0 if report.equal else 1
