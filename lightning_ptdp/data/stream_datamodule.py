"""Common base of the data modules, and their batch sizes.

The base gives each replica its samples, and resumes training exactly in the middle of an epoch.
"""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from lightning.pytorch import LightningDataModule, Trainer

from lightning_ptdp.base.data_record import WORKING_FOLDER, DatasetRecord, DescribedData
from lightning_ptdp.base.option_types import Count, Size, check_arguments, check_types
from lightning_ptdp.data.loader import EvaluationLoader, TokenLoader
from lightning_ptdp.data.manifest import SplitName
from lightning_ptdp.data.stream import SampleStream
from lightning_ptdp.shims.lightning import fits
from lightning_ptdp.world.batch_size import BatchPlan, RampUp

Loader = TypeVar("Loader")


class StreamDataModule(DescribedData, LightningDataModule):
    """Batches of the samples of a stream; subclasses define the stream (``_stream``).

    A replica's batch holds ``micro_batch_size * num_microbatches`` samples: ``{"input_ids",
    "labels"}``, int64 of shape (batch, sequence_length). Labels are shifted by one, and -100 where
    nothing is learned. ``global_batch_size = micro_batch_size * num_microbatches * replicas``: any
    two sizes determine the third.

    Args:
        sequence_length: Tokens of a sample.
        validation_samples: Number of validation samples to use, from the first on. Default: all.
        seed: Seed of the order of the training samples.
        num_workers: Number of processes per rank that read ahead.
        kwargs: Arguments of ``BatchOptions``: batch sizes and their ramp-up.

    Attributes:
        vocabulary_size: Number of ids that a token can have; subclasses set it.

    Raises:
        ValueError: A number is out of range; the message names it.
    """

    vocabulary_size: int

    def __init__(
        self,
        *,
        sequence_length: Size = 256,
        validation_samples: Size | None = None,
        seed: Count = 0,
        num_workers: Count = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        check_arguments(StreamDataModule.__init__, locals())
        self.sequence_length = sequence_length
        self.batch_options = BatchOptions(**kwargs)
        self.validation_samples = validation_samples
        self.seed = seed
        self.num_workers = num_workers
        self._train: TokenLoader | None = None
        self._train_for: Trainer | None = None
        self._saved: dict[str, Any] = {}

    @property
    def batch_size(self) -> int:
        """Samples in a batch of one replica, after the ramp-up."""
        return self.batch_options.plan(replica_of(self.trainer)[0]).replica_batch

    @property
    def step_sizes(self) -> RampUp:
        """Samples of every step, summed over all replicas."""
        return self.batch_options.ramp(replica_of(self.trainer)[0])

    def batch_plans(self, *, num_replicas: int) -> tuple[BatchPlan, ...]:
        """Return the sizes of all steps on ``num_replicas`` replicas.

        This is one plan, or the plans of the ramp-up in order.

        Raises:
            ValueError: The sizes do not divide. The message gives sizes that do.
        """
        return self.batch_options.plans(num_replicas)

    def check(self, *, num_replicas: int = 1) -> None:
        """Check before a process is started that the data exist and suffice; write nothing.

        The data must hold the samples of a step of ``num_replicas`` replicas.

        Raises:
            DataError: The data are damaged, too few, or do not fit the settings.
            ValueError: The batch sizes do not divide for this number of replicas.
        """
        self.num_training_batches(num_replicas=num_replicas)
        self._stream("validation")

    def num_training_batches(self, *, num_replicas: int = 1) -> int:
        """Return the number of batches of an epoch of one replica, after the ramp-up.

        The data must be prepared.
        """
        batch_size = self.batch_plans(num_replicas=num_replicas)[-1].replica_batch
        return len(
            TokenLoader(self._stream("train"), batch_size=batch_size, num_replicas=num_replicas)
        )

    def datasets(self) -> list[DatasetRecord]:
        """Return records of the data for training and validation."""
        paths = [str(Path(path).absolute()) for path in self._places()]
        streams = {
            "training": self._stream("train"),
            "validation": self._stream("validation", max_samples=self.validation_samples),
        }
        return [
            DatasetRecord(
                name=" + ".join(Path(path).name for path in paths),
                context=context,
                digest=stream.fingerprint,
                source={"places": paths, "text": self._text()},
                profile={"samples": len(stream), "tokens": len(stream) * self.sequence_length},
            )
            for context, stream in streams.items()
        ]

    def train_dataloader(self) -> TokenLoader:
        """Return shuffled batches of this replica, from the checkpoint's position on.

        Raises:
            ValueError: A ramp-up is combined with the Trainer's ``accumulate_grad_batches``.
        """
        self._prepare_ramp()
        loader = self._train_loader(self._stream("train"))
        overfit = self.trainer.overfit_batches if self.trainer is not None else 0
        if overfit:
            steps = overfit if isinstance(overfit, int) else max(int(overfit * len(loader)), 1)
            loader = self._train_loader(
                self._stream("train", max_samples=steps * loader.step_samples)
            )
        if self._saved:
            loader.load_state_dict(self._saved)
        elif self._train is not None and self.trainer is not None and self.trainer.global_step:
            loader.load_state_dict(self._train.state_dict())
        self._train = loader
        self._train_for = self.trainer
        self._saved = {}
        return loader

    def val_dataloader(self) -> EvaluationLoader:
        """Return a loader that reads every validation sample once, over all replicas."""
        return self._evaluation_loader(
            self._stream("validation", max_samples=self.validation_samples)
        )

    def test_dataloader(self) -> EvaluationLoader:
        """Return the loader of the validation samples, because there is no third split."""
        return self.val_dataloader()

    def predict_dataloader(self) -> EvaluationLoader:
        """Return the loader of the validation samples."""
        return self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training data, saved in checkpoints.

        It includes the working directory, to which the paths in the hyperparameters are relative.
        """
        state = dict(self._saved) if self._train is None else self._train.state_dict()
        if state:
            with contextlib.suppress(OSError):  # the directory was removed
                state[WORKING_FOLDER] = os.getcwd()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the position of a checkpoint.

        The position goes to the training loader of this fit, or to the next one if there is none
        yet. Validation, test and prediction restore checkpoints, too, but change no position.

        Raises:
            DataError: The position belongs to other data. If there is no loader yet,
                ``train_dataloader`` raises it.
        """
        if self.trainer is not None and not fits(self.trainer):
            return
        # A strategy may restore after its set-up. By then configure_optimizers may have asked for
        # the number of steps, and so have created the loader.
        if self._train is not None and self._train_for is self.trainer:
            self._train.load_state_dict(state_dict)
        else:
            self._saved = dict(state_dict)

    @abstractmethod
    def _places(self) -> list[str]:
        """Return the folders, or prefixes of files, of the data."""

    def _text(self) -> list[str]:
        """Return the sources of the data, if they are known."""
        return []

    @abstractmethod
    def _stream(self, split: SplitName, max_samples: int | None = None) -> SampleStream:
        """Return the samples of a split, or only ``max_samples`` of them."""

    def _evaluation_loader(self, stream: SampleStream) -> EvaluationLoader:
        micro_batch_size = self.batch_options.plan(replica_of(self.trainer)[0]).micro_batch_size
        return self._loader(EvaluationLoader, stream, micro_batch_size=micro_batch_size)

    def _train_loader(self, stream: SampleStream) -> TokenLoader:
        return self._loader(
            TokenLoader, stream, ramp_up=self.step_sizes, seed=self.seed, in_flight=self._in_flight
        )

    def _loader(
        self, loader_class: Callable[..., Loader], stream: SampleStream, **options: object
    ) -> Loader:
        num_replicas, replica_rank = replica_of(self.trainer)
        return loader_class(
            stream,
            batch_size=self.batch_size,
            num_replicas=num_replicas,
            replica_rank=replica_rank,
            num_workers=self.num_workers,
            pin_memory=self.trainer is not None
            and self.trainer.strategy.root_device.type == "cuda",
            **options,
        )

    def _prepare_ramp(self) -> None:
        if self.batch_options.ramp_up is None or self.trainer is None:
            return
        accumulated = self.trainer.accumulate_grad_batches
        if accumulated != 1:
            raise ValueError(
                f"ramp_up with accumulate_grad_batches={accumulated} is not supported, because "
                "Lightning gives batches of different sizes the same weight. Use "
                "accumulate_grad_batches=1 and more microbatches, which also accumulate "
                "gradients (global_batch_size)"
            )
        # Later epochs have fewer steps. Lightning determines the number of steps, and the time of
        # validation, when it loads the loader.
        self.trainer.reload_dataloaders_every_n_epochs = 1

    def _in_flight(self) -> int:
        """Return the number of batches handed out but not used for training.

        It is one if an exception in a step triggers a checkpoint.
        """
        if self.trainer is None:
            return 0
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return int(progress.ready - progress.processed)


def replica_of(trainer: Trainer | None) -> tuple[int, int]:
    """Return (number of replicas, this replica) as the strategy defines them.

    All ranks of a replica read the same samples.
    """
    strategy = trainer.strategy if trainer is not None else None
    kwargs = getattr(strategy, "distributed_sampler_kwargs", None)
    return (1, 0) if kwargs is None else (int(kwargs["num_replicas"]), int(kwargs["rank"]))


# ---- Batch sizes, and the plans that follow for a number of replicas -----------------------------


_MICRO_BATCH_SIZE = 8


class RampUpOptions(TypedDict):
    """Growth of the global batch to its full size.

    A plain mapping, because checkpoints and YAML files contain it.
    """

    start: Size
    """Global batch of the first step: a multiple of ``micro_batch_size * replicas``."""
    increment: Size
    """Samples added to the global batch at a time: a multiple of ``micro_batch_size * replicas``.
    """
    samples: Size
    """Number of samples over which the global batch grows."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Batch sizes as the user gives them.

    ``global_batch_size = micro_batch_size * num_microbatches * replicas``. Any two sizes determine
    the third.

    Args:
        global_batch_size: Samples in one step of all replicas.
        micro_batch_size: Samples in a microbatch. Default: 8, or derived from the other two.
        num_microbatches: Microbatches in one step of one replica. Default: 1, or derived from the
            other two.
        ramp_up: Start with a global batch of ``start`` samples and grow it by ``increment`` at a
            time to its full size, over the first ``samples`` samples (arXiv 2005.14165, section
            2.3). The strategy needs ``PTDPStrategy(micro_batch_size=...)`` to follow.

    Raises:
        ValueError: A number is out of range, too few sizes are given, or the ramp-up has other
            keys. The message names field and value.
    """

    global_batch_size: Size | None = None
    micro_batch_size: Size | None = None
    num_microbatches: Size | None = None
    ramp_up: RampUpOptions | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if (
            self.global_batch_size is not None
            and self.micro_batch_size is None
            and self.num_microbatches is None
        ):
            raise ValueError(
                f"global_batch_size={self.global_batch_size} alone does not determine the "
                "microbatches. Set micro_batch_size or num_microbatches, too"
            )

    def plan(self, num_replicas: int) -> BatchPlan:
        """Return the sizes of a step of ``num_replicas`` replicas after the ramp-up.

        Raises:
            ValueError: The sizes do not divide. The message gives sizes that do.
        """
        micro_batch_size = self.micro_batch_size
        num_microbatches = self.num_microbatches
        if self.global_batch_size is None:
            micro_batch_size = micro_batch_size or _MICRO_BATCH_SIZE
            num_microbatches = num_microbatches or 1
        return BatchPlan.derive(
            data_parallel_size=num_replicas,
            global_batch_size=self.global_batch_size,
            micro_batch_size=micro_batch_size,
            num_microbatches=num_microbatches,
        )

    def ramp(self, num_replicas: int) -> RampUp:
        """Return the global batch of every step; it is constant without ``ramp_up``.

        Raises:
            ValueError: The ramp does not end at the global batch, or one of its sizes is not a
                whole number of microbatches on every replica.
        """
        plan = self.plan(num_replicas)
        full = plan.global_batch
        if self.ramp_up is None:
            return RampUp.constant(full)
        try:
            ramp = RampUp(stop=full, **self.ramp_up)
            ramp.plans(data_parallel_size=num_replicas, micro_batch_size=plan.micro_batch_size)
        except ValueError as error:
            unit = plan.micro_batch_size * num_replicas
            raise ValueError(
                f"ramp_up={dict(self.ramp_up)} up to a global batch of stop={full}, in "
                f"microbatches of {plan.micro_batch_size} on {num_replicas} replicas: {error}. Its "
                f"start and increment must be multiples of {unit}"
            ) from None
        return ramp

    def plans(self, num_replicas: int) -> tuple[BatchPlan, ...]:
        """Return the plans of all sizes that the ramp-up passes through, in order.

        Raises:
            ValueError: As for ``plan`` and ``ramp``.
        """
        micro_batch_size = self.plan(num_replicas).micro_batch_size
        return self.ramp(num_replicas).plans(
            data_parallel_size=num_replicas, micro_batch_size=micro_batch_size
        )
