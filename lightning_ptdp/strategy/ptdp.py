"""Strategy for Lightning: its hooks, each a few lines that call other packages.

Order of a run: ``setup_environment`` (groups) -> ``setup`` (convert, cut, give values, shard,
optimizer, buckets) -> for every batch ``training_step`` (the schedule runs forward and backward) ->
``zero_grad`` -> ``backward`` (installs the gradients) -> clipping -> ``optimizer_step``. Gradients
are hidden from Lightning between ``training_step`` and ``backward``, because Lightning clears them
there."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache, wraps
from inspect import Parameter, Signature
from typing import Any, get_type_hints

import torch

from lightning_ptdp.callbacks.artifacts import mlflow_loggers
from lightning_ptdp.callbacks.run_summary import StrategySummary, summarize
from lightning_ptdp.checkpoint.remote_path import check_address
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.forward.surroundings import Surroundings
from lightning_ptdp.parameters.materialize import awaits_values
from lightning_ptdp.shims.lightning import (
    LightningModule,
    StrategyBase,
    Trainer,
    fits,
    lightning_names,
)
from lightning_ptdp.strategy.checks.data import check_source
from lightning_ptdp.strategy.checks.machine_limits import check_visible
from lightning_ptdp.strategy.checks.model import check_initial_weights, check_model
from lightning_ptdp.strategy.checks.trainer import check_trainer
from lightning_ptdp.strategy.checks.trials import (
    check_first_batch,
    check_save_hook,
    verify_first_step,
    warn_of_objects,
)
from lightning_ptdp.strategy.launch import make_launcher
from lightning_ptdp.strategy.layout_choice import (
    Forecast,
    LayoutChoice,
    chosen_layout,
    wants_choice,
)
from lightning_ptdp.strategy.out_of_memory import explain_memory
from lightning_ptdp.strategy.precision import replacing
from lightning_ptdp.strategy.saving import FolderSaves
from lightning_ptdp.strategy.setup_hooks import SetupHooks
from lightning_ptdp.strategy.snapshots import Snapshots


def constructor(
    construct: Callable[..., None], lightning: Callable[..., None]
) -> Callable[..., None]:
    """Return ``construct`` with the signature that ``inspect`` and jsonargparse read.

    ``lightning`` is the constructor of Lightning's class."""

    @wraps(construct)
    def init(self: StrategyBase, **options: Any) -> None:
        construct(self, **options)

    all_parameters = [
        Parameter("self", Parameter.POSITIONAL_OR_KEYWORD),
        Parameter("layout", Parameter.KEYWORD_ONLY, default=None, annotation=LayoutChoice | None),
    ]
    for source in (PTDPConfig.__init__, lightning):
        hints = get_type_hints(source)
        parameters = list(inspect.signature(source).parameters.values())[1:]
        all_parameters += [
            parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            for parameter in parameters
        ]
    init.__qualname__ = "PTDPStrategy.__init__"
    vars(init)["__signature__"] = Signature(all_parameters)
    return init


class _PTDPStrategy(SetupHooks):
    """Lightning's hooks of the strategy before launch, around training, and at the end.

    The layers below it are, in order: ``RunningStrategy`` (collectives), ``World`` (ranks and
    groups), ``CheckpointHooks``, ``StepHooks`` and ``SetupHooks``. The constructor
    takes the fields of ``PTDPConfig`` and the arguments of Lightning's own strategies."""

    strategy_name = "ptdp"

    def __init__(self, *, layout: LayoutChoice | None = None, **options: Any) -> None:
        config_options = {
            field.name: options.pop(field.name)
            for field in fields(PTDPConfig)
            if field.name in options
        }
        self.config = PTDPConfig(**config_options)
        self._chooses_layout = wants_choice(layout, self.config)
        self._forecast: Forecast | None = None
        self.num_nodes = 1
        self._parent = os.getppid()
        self._changes = contextlib.ExitStack()
        self._surroundings = Surroundings()
        self._saves = FolderSaves()
        self.snapshots = Snapshots(self)
        self._named_groups = []
        super().__init__(**options)

    # ---- before launch ---------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        self.follow_launcher()
        check_visible(self.parallel_devices, self.local_rank)
        # Raise before any process is started if the degrees do not fit the number of devices.
        _ = self.layout
        self._launcher = make_launcher(self)

    def check_before_launch(self, trainer: Trainer | None, arguments: Sequence[object]) -> None:
        """Check everything that is known before processes start.

        Args:
            trainer: The Trainer; None outside of its functions.
            arguments: Arguments of the Trainer's function.
        """
        if trainer is None or self.lightning_module is None:
            return
        for argument in arguments:  # includes ckpt_path
            check_address(argument)
        self.note_callbacks(trainer.callbacks)
        # the train dataloader and the data module
        sources = [data for data in (*arguments[1:2], *arguments[3:4]) if data is not None]
        if fits(trainer):
            self.check_processes()
            self._choose_layout(trainer, sources)
        check_trainer(self, trainer)
        self.check_machine()
        logs = self.is_global_zero and trainer.state.fn != "predict"  # it may log nothing
        for logger in mlflow_loggers(trainer) if logs else ():
            logger.check()
        self.snapshots.check()
        if not self.model_space.is_cut:
            self.check(self.lightning_module)
        if not fits(trainer):
            return
        if trainer.checkpoint_callbacks and self.is_global_zero and not self.writes_file:
            for owner in (self.lightning_module, *sources):
                warn_of_objects(owner)
            if self.starts_all_ranks and self._names.is_overridden(
                "on_save_checkpoint", self.lightning_module
            ):
                check_save_hook(self.lightning_module)
        for source in sources:
            check_source(self.lightning_module, source, self.config, self.layout)
        if self.starts_all_ranks and not self.model_space.is_cut:
            check_first_batch(
                trainer,
                self.lightning_module,
                sources[0] if sources else None,
                config=self.config,
                layout=self.layout,
                known=self._known_parts,
            )
        if self.config.verify is not None:
            verify_first_step(self, trainer, arguments)

    def _choose_layout(self, trainer: Trainer, sources: Sequence[object]) -> None:
        if self._chooses_layout:  # a further fit continues in the same layout
            self.config, self._forecast = chosen_layout(self, trainer, sources)
            self._chooses_layout = False
            if self.is_global_zero:
                print(self._forecast.text, flush=True)

    def check(self, lightning_module: LightningModule, datamodule: object = None) -> None:
        """Check a module (and data module) against the layout without starting anything.

        Raises:
            ValueError: Names the field, its value and values that would work.
        """
        check_initial_weights(lightning_module, self.config)
        convert = replacing(self)
        self._known_parts = check_model(lightning_module, self.config, self.layout, convert=convert)
        if datamodule is not None:
            check_source(lightning_module, datamodule, self.config, self.layout)

    def summary(self) -> StrategySummary:
        """Return a summary of the layout; collective, after ``setup``."""
        return summarize(self)

    def on_train_start(self) -> None:
        """Check that the hooks before the training did not replace parameters."""
        super().on_train_start()
        self.parallel.check(frozen=False)

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Record the start of the batch if the layout was chosen by a forecast.

        In the first batch of an epoch, parameters are checked as in ``on_train_start``."""
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0:
            self.parallel.check(frozen=False)
        if self._forecast is not None:
            self._forecast.batch_begins()

    def on_train_end(self) -> None:
        """Compare the forecast of the layout with the measurements."""
        super().on_train_end()
        if self._forecast is not None and self.is_global_zero:
            self._forecast.report(self.lightning_module.trainer, self.root_device)

    def on_exception(self, exception: BaseException) -> None:
        """Add a memory report to an out-of-memory error, then let the layers below handle it."""
        if isinstance(exception, torch.OutOfMemoryError):
            # A failure of the report must not hide the error.
            with contextlib.suppress(Exception):
                exception.add_note(explain_memory(self))
        super().on_exception(exception)

    # ---- the end ---------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Wait for a background save, then release the gradients and the device."""
        try:
            self._release()
        finally:
            self.leave_environment()
            if self._run is not None:
                # Close it last: it still names a failing collective, such as that of a checkpoint
                # saved after the fit.
                self._run.watchdog.close()

    def _release(self) -> None:
        self.finish_saving()
        self.snapshots.remove()
        if self._engine is not None:
            with self.waiting_in("the last gathered parameters"):
                self._engine.close()
        if self._run is not None:
            self._run.interruption.leave()
        if self.lightning_module is not None and awaits_values(self.lightning_module):
            return  # setup failed before there were values: moving them would hide the reason
        super().teardown()

    def __getstate__(self) -> dict[str, object]:
        """Return the state without process groups, which cannot be copied or pickled.

        ``setup_environment`` makes new ones."""
        state = super().__getstate__()
        return {
            **state,
            **dict.fromkeys(("_run", "_parallel", "_engine", "_guard", "_heap")),
            "_changes": contextlib.ExitStack(),
            "_surroundings": Surroundings(),
            "_saves": FolderSaves(),
        }


@lru_cache(maxsize=2)
def strategy_class(namespace: str) -> type[StrategyBase]:
    """Return the strategy for one of Lightning's two namespaces.

    These are ``lightning.pytorch`` and ``pytorch_lightning``."""
    names = lightning_names(namespace)
    # pickle finds a class by its qualified name in this module.
    qualified = "PTDPStrategy" if namespace == "lightning.pytorch" else _OTHER_NAME
    body = {
        "_names": names,
        "__doc__": PTDPConfig.__doc__,
        "__module__": __name__,
        "__qualname__": qualified,
        "__init__": constructor(_PTDPStrategy.__init__, names.ParallelStrategy.__init__),
    }
    return type("PTDPStrategy", (_PTDPStrategy, names.ParallelStrategy), body)


_OTHER_NAME = "PyTorchLightningPTDPStrategy"
PTDPStrategy: Any = strategy_class("lightning.pytorch")


def __getattr__(name: str) -> type[StrategyBase]:
    """Import the other namespace only when it is used."""
    if name == _OTHER_NAME:
        return strategy_class("pytorch_lightning")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
