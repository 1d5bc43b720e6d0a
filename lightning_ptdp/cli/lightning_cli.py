"""The subclass of LightningCLI that ``ptdp`` uses.

Each verb has one flat configuration with any LightningModule and any LightningDataModule.
"""

from __future__ import annotations

import pkgutil
from argparse import SUPPRESS, ArgumentError
from collections.abc import Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import yaml
from jsonargparse import ActionConfigFile, Namespace, get_loader, set_dumper, set_loader
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

# Imported so that a configuration may name the classes without their module: ``class_path:
# LitGPT``.
from lightning_ptdp import callbacks, data, loggers, strategy  # noqa: F401
from lightning_ptdp.callbacks import (
    ExpertLoad,
    ExportHuggingFace,
    Goodput,
    GradientNorm,
    InitFrom,
    LayoutSummary,
    LearningRate,
    LogDatasets,
    RunReport,
    SaveOnSignal,
    SaveResolvedConfig,
    StepProgress,
    Throughput,
    TrainPerplexity,
    ValidateAtEnd,
)
from lightning_ptdp.cli.command_line import DESCRIPTIONS, add_options, options_of_verb, options_on
from lightning_ptdp.cli.config_errors import check_values, dotted, readable
from lightning_ptdp.cli.config_files import checked, dump_yaml
from lightning_ptdp.cli.failures import UserError
from lightning_ptdp.cli.serving_verbs import SampleOptions
from lightning_ptdp.models import (  # noqa: F401
    LitBert,
    LitCausalLM,
    LitDPO,
    LitGPT,
    LitImageTextToText,
    LitMaskedLM,
)
from lightning_ptdp.models.pretrained_folder import local_folder

_LOADERS = MappingProxyType({"validate": "val", "test": "test", "predict": "predict"})


class _ExactParser(LightningArgumentParser):
    """A parser without abbreviated options.

    jsonargparse uses the class of the outermost parser for the arguments of nested classes too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})


class PTDPCLI(LightningCLI):
    """A parsed configuration and the objects that it describes. The caller runs them.

    Args:
        verb: Verb shown in the help; "fit" adds the callbacks that only training needs.
        arguments: The command line after the verb.

    Raises:
        UserError: A key, a class or a value is wrong.
    """

    def __init__(self, verb: str, arguments: list[str]) -> None:
        self.verb = verb
        for option in options_on(arguments):
            if option.name in {f"--{name}" for name in _training_keys(verb)}:
                raise UserError(f"{option.name} is an option of ptdp fit, not of ptdp {verb}")
        super().__init__(
            args=_with_class_path(arguments),
            run=False,
            save_config_callback=None,
            seed_everything_default=1234,
            auto_configure_optimizers=False,
            parser_kwargs={
                "prog": f"ptdp {verb}",
                "description": DESCRIPTIONS[verb],
                "exit_on_error": False,
                "parser_mode": _CHECKED,
            },
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return a parser like Lightning's that accepts no abbreviated options.

        ``--model.config.num_layer`` is therefore not an option.
        """
        parser = _ExactParser(**{"dump_header": [f"lightning.pytorch=={pl.__version__}"], **kwargs})
        parser.add_argument(
            "-c",
            "--config",
            action=ActionConfigFile,
            help="Path to a configuration file in json or yaml format.",
        )
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the verb's own keys."""
        parser.add_lightning_class_args(Throughput, "throughput")
        add_options(parser, options_of_verb(self.verb))
        for name in _training_keys(self.verb):
            parser.add_argument(f"--{name}", default=SUPPRESS, help=SUPPRESS)
        parser.add_argument(
            "--sample",
            type=SampleOptions | None,
            default=SampleOptions(),
            help="Text to continue with the new checkpoint at the end of training; null for none.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments and shorten an error to one line."""
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            raise UserError(readable(str(error.message), dotted(parser.get_defaults()))) from error
        check_values(self.config, parser.get_defaults())

    def instantiate_classes(self) -> None:
        """Build all objects, and check that there are data, with a short message for each error.

        jsonargparse wraps the errors of nested dataclasses in its own words.
        """
        try:
            super().instantiate_classes()
        except MisconfigurationException as error:
            if "value is not a valid input using cpu accelerator" in str(error):
                raise self._wrong_devices() from error
            if "gpu backend" not in str(error) and "CUDAAccelerator" not in str(error):
                raise
            raise UserError(
                f"trainer.accelerator={self.config.trainer.accelerator}, but torch finds no GPU "
                "(for the reason, run ptdp doctor). Without a GPU, use --trainer.accelerator cpu "
                "--trainer.precision 32-true, and at most as many --trainer.devices as the machine "
                "has cores; ptdp recipes show common explains how the layout is derived"
            ) from error
        except TypeError as error:
            if "`devices` selected with `CPUAccelerator`" not in str(error):
                raise
            raise self._wrong_devices() from error
        except ValueError as error:
            raise UserError(readable(str(error), ())) from error
        loader = f"{_LOADERS.get(self.verb, 'train')}_dataloader"
        if self.datamodule is None and not is_overridden(loader, self.model):
            raise UserError(
                f"there is no data: --data is not set, and {type(self.model).__name__} has no "
                f"{loader}. Use --data TextDataModule, or your own, such as --data my_module.MyData"
            )

    def _wrong_devices(self) -> UserError:
        return UserError(
            f"trainer.devices={self.config.trainer.devices} is not a number of processes. "
            "On a CPU, use --trainer.devices 1 or more"
        )

    def before_instantiate_classes(self) -> None:
        """Set the data's tokenizer to the model's own, and add the callbacks of every training.

        Callbacks of the configuration are kept.
        """
        take_tokenizer(self.config)
        self.report = RunReport()
        if self.verb == "fit":
            resolved = self.parser.dump(self.config, skip_none=False)
            self.values: dict[str, Any] = yaml.safe_load(resolved)
            self.config_dump = deepcopy(self.values)  # else Lightning writes and reads it again
            trainer = self.config.trainer
            usual: list[pl.Callback] = [
                Goodput(),
                self.report,
                LayoutSummary(),
                LogDatasets(),
                LearningRate(),
                GradientNorm(),
                TrainPerplexity(),
                ValidateAtEnd(),
                SaveResolvedConfig(resolved),
                SaveOnSignal(),
                ExpertLoad(),
            ]
            added = [
                callback
                for callback in usual
                if callback is self.report or not _has(trainer, type(callback))
            ]
            if trainer.enable_progress_bar is not False and not _has(trainer, ProgressBar):
                added.append(StepProgress())
            if self.config.init_from is not None:
                added.append(InitFrom(self.config.init_from))
            if self.config.export is not None:
                added.append(ExportHuggingFace(self.config.export))
            self.trainer_defaults["callbacks"] = added


def _training_keys(verb: str) -> list[str]:
    """Return keys of ``fit`` that ``verb`` ignores in a configuration, such as a run's own."""
    own = options_of_verb(verb)
    return [option.name for option in options_of_verb("fit") if option not in own]


def _with_class_path(arguments: list[str]) -> list[str]:
    """Return the command line with this package's strategy and logger as class paths.

    The parser keeps the options that earlier configurations give to the same class. A strategy's
    name would replace them. Lightning has a logger of the same name.
    """
    words: list[str] = []
    for option in options_on(arguments):
        package, _, name = (option.value or "").rpartition(".")
        is_ours = package.partition(".")[0] in ("", "lightning_ptdp")
        key = option.name.removesuffix(".class_path").removesuffix("+")
        path = _CLASS_PATHS.get((key, name)) if is_ours else None
        if path is None:
            words += option.words
        else:
            words.append(f"{option.name if '+' in option.name else f'{key}.class_path'}={path}")
    return words


_CLASS_PATHS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("--trainer.strategy", "ptdp"): "lightning_ptdp.PTDPStrategy",
        ("--trainer.strategy", "PTDPStrategy"): "lightning_ptdp.PTDPStrategy",
        ("--trainer.logger", "MLFlowLogger"): "lightning_ptdp.loggers.MLFlowLogger",
    }
)


def _with_our_logger(values: Any) -> Any:
    """Return values of a file with this package's logger for the class path ``MLFlowLogger``."""
    if isinstance(values, list):
        return [_with_our_logger(value) for value in values]
    if not isinstance(values, dict):
        return values
    named = {key: _with_our_logger(value) for key, value in values.items()}
    path = _CLASS_PATHS.get(("--trainer.logger", str(named.get("class_path"))))
    return named if path is None else {**named, "class_path": path}


def take_tokenizer(config: Namespace) -> None:
    """Set the data's tokenizer to that of the model's folder.

    Nothing changes if the model is not from a folder, or if the data already have a tokenizer or
    need none.
    """
    path = config.get("model.init_args.path")
    if path is None or config.get("data.init_args.tokenizer_dir", path) is not None:
        return
    # BERT's data need control symbols that only our own tokenizers have.
    if not getattr(pkgutil.resolve_name(config.data.class_path), "control_symbols", ()):
        config["data.init_args.tokenizer_dir"] = str(local_folder(path))


def _has(trainer: Namespace, kind: type[pl.Callback]) -> bool:
    """Return True if the configuration has a callback of class ``kind``."""
    configured = trainer.callbacks or []
    entries = configured if isinstance(configured, list) else [configured]
    return any(issubclass(pkgutil.resolve_name(entry.class_path), kind) for entry in entries)


class _ParsedOnly(PTDPCLI):
    """A configuration that is only parsed, so that it may be for another machine.

    ``text`` holds all of it as YAML. No class is built.
    """

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        self.text = parser.dump(self.config, skip_none=False)
        self.config.seed_everything = False  # nothing random follows

    def before_instantiate_classes(self) -> None:
        """Change nothing."""

    def instantiate_classes(self) -> None:
        """Build nothing."""


def parsed_values(arguments: list[str]) -> dict[str, Any]:
    """Return the configuration that ``ptdp fit`` would use, with every default filled in.

    The parser checks the configuration.

    Raises:
        UserError: A key, a class or a value is wrong.
    """
    return yaml.safe_load(_ParsedOnly("fit", arguments).text)


# The loader also reads files that a configuration names, such as --model model.yaml.
_CHECKED = "checked yaml"
set_loader(
    _CHECKED,
    lambda text: _with_our_logger(checked(text, get_loader("yaml"))),
    exceptions=(ValueError,),
)
set_dumper("yaml", dump_yaml)  # else config.yaml of a run is read back differently
