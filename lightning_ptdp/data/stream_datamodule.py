"""Common base of the data modules: each replica gets its samples, and training resumes exactly in
the middle of an epoch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import LightningDataModule, Trainer

from lightning_ptdp.base.data_record import DatasetRecord
from lightning_ptdp.base.option_types import Count, Size, check_arguments
from lightning_ptdp.data.batch_options import BatchOptions
from lightning_ptdp.data.loader import EvaluationLoader, TokenLoader
from lightning_ptdp.data.manifest import SplitName
from lightning_ptdp.data.stream import SampleStream
from lightning_ptdp.world.batch_size import BatchPlan, RampUp

__all__ = ["StreamDataModule", "replica_of"]

Loader = TypeVar("Loader")


class StreamDataModule(LightningDataModule):
    """Batches of the samples of a stream; subclasses say which stream (``_stream``).

    A replica's batch holds ``micro_batch_size * num_microbatches`` samples: ``{"input_ids",
    "labels"}``, int64 of shape (batch, sequence_length), labels shifted by one and -100 where
    nothing is to be learned. Of ``global_batch_size = micro_batch_size * num_microbatches *
    replicas`` give any two, the third follows.

    Args:
        sequence_length: Tokens of a sample.
        validation_samples: Validate on the first so many samples; none is all.
        seed: Of the order of the training samples.
        num_workers: Processes that read ahead, for each rank.
        kwargs: Those of ``BatchOptions``: batch sizes and their ramp-up.

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
        """The samples of every step, of all replicas."""
        return self.batch_options.ramp(replica_of(self.trainer)[0])

    def batch_plans(self, *, num_replicas: int) -> tuple[BatchPlan, ...]:
        """The sizes of all steps that there will be on ``num_replicas`` replicas: one plan, or
        those of the ramp-up in their order.

        Raises:
            ValueError: The sizes do not divide; says what would.
        """
        return self.batch_options.plans(num_replicas)

    def check(self, *, num_replicas: int = 1) -> None:
        """Find what is wrong before a process is started: whether the data are there and hold a
        step's samples for ``num_replicas`` replicas. Writes nothing.

        Raises:
            DataError: They are damaged, too few, or do not fit the settings.
            ValueError: The batch sizes do not divide for so many replicas.
        """
        batch_size = self.batch_plans(num_replicas=num_replicas)[-1].replica_batch
        TokenLoader(self._stream("train"), batch_size=batch_size, num_replicas=num_replicas)
        self._stream("validation")

    def num_training_batches(self, *, num_replicas: int = 1) -> int:
        """Return the number of batches of an epoch of one replica, after the ramp-up; the data must
        be prepared."""
        batch_size = self.batch_plans(num_replicas=num_replicas)[-1].replica_batch
        return len(
            TokenLoader(self._stream("train"), batch_size=batch_size, num_replicas=num_replicas)
        )

    def datasets(self) -> list[DatasetRecord]:
        """Return records of the data for training and validation."""
        places = [str(Path(place).absolute()) for place in self._places()]
        streams = {
            "training": self._stream("train"),
            "validation": self._stream("validation", max_samples=self.validation_samples),
        }
        return [
            DatasetRecord(
                name=" + ".join(Path(place).name for place in places),
                context=context,
                digest=stream.fingerprint,
                source={"places": places, "text": self._text()},
                profile={"samples": len(stream), "tokens": len(stream) * self.sequence_length},
            )
            for context, stream in streams.items()
        ]

    def train_dataloader(self) -> TokenLoader:
        """Shuffled batches of this replica, from the checkpoint's position on.

        Raises:
            ValueError: A ramp-up with the Trainer's ``accumulate_grad_batches``.
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
        self._train, self._train_for, self._saved = loader, self.trainer, {}
        return loader

    def val_dataloader(self) -> EvaluationLoader:
        """Every validation sample once, over all replicas."""
        stream = self._stream("validation", max_samples=self.validation_samples)
        micro_batch_size = self.batch_options.plan(replica_of(self.trainer)[0]).micro_batch_size
        return self._loader(EvaluationLoader, stream, micro_batch_size=micro_batch_size)

    def test_dataloader(self) -> EvaluationLoader:
        """The validation samples: there is no third split."""
        return self.val_dataloader()

    def predict_dataloader(self) -> EvaluationLoader:
        """The validation samples."""
        return self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """The place in the training data, saved in checkpoints."""
        return self._train.state_dict() if self._train is not None else dict(self._saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's place, with this fit's training loader if there is one
        already, else with the next one.

        Raises:
            DataError: Now or from ``train_dataloader``, if the place belongs to other data.
        """
        # A strategy may restore after its set-up, in which configure_optimizers may have asked for
        # the number of steps, and so for the loader.
        if self._train is not None and self._train_for is self.trainer:
            self._train.load_state_dict(state_dict)
        else:
            self._saved = dict(state_dict)

    @abstractmethod
    def _places(self) -> list[str]:
        """Folders, or prefixes of files, of the data."""

    def _text(self) -> list[str]:
        """Return the sources of the data, if they are known."""
        return []

    @abstractmethod
    def _stream(self, split: SplitName, max_samples: int | None = None) -> SampleStream:
        """The samples of a split, or the first so many of them."""

    def _train_loader(self, stream: SampleStream) -> TokenLoader:
        return self._loader(
            TokenLoader, stream, ramp_up=self.step_sizes, seed=self.seed, in_flight=self._in_flight
        )

    def _loader(
        self, made: Callable[..., Loader], stream: SampleStream, **options: object
    ) -> Loader:
        num_replicas, replica_rank = replica_of(self.trainer)
        return made(
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
                f"ramp_up with accumulate_grad_batches={accumulated}: Lightning weights batches "
                "of different sizes alike. Use "
                "accumulate_grad_batches=1 and more microbatches, which accumulate too "
                "(global_batch_size)"
            )
        # An epoch has fewer steps than the one before it; Lightning asks for their number, and when
        # to validate, with the loader.
        self.trainer.reload_dataloaders_every_n_epochs = 1

    def _in_flight(self) -> int:
        """Batches that were handed out and not trained on: one, where an exception in a step makes
        a checkpoint."""
        if self.trainer is None:
            return 0
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return int(progress.ready - progress.processed)


def replica_of(trainer: Trainer | None) -> tuple[int, int]:
    """(number of replicas, this replica) as the strategy has them: peers inside a replica are one
    reader."""
    strategy = trainer.strategy if trainer is not None else None
    kwargs = getattr(strategy, "distributed_sampler_kwargs", None)
    return (1, 0) if kwargs is None else (int(kwargs["num_replicas"]), int(kwargs["rank"]))
