"""Models, data and strategies of the conformance tests.

Lightning's own strategies give the expected results.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptdp.strategy import PTDPStrategy
from tests import parity
from tests.pool import Pool

FEATURES = 8


@dataclass(frozen=True, kw_only=True)
class Place:
    """A strategy and its number of processes. ``reference`` names one of Lightning's own
    strategies; None stands for PTDPStrategy."""

    world_size: int = 1
    reference: str | None = None
    layout: dict[str, Any] = field(default_factory=dict)

    @property
    def strategy(self) -> Any:
        return PTDPStrategy(**self.layout) if self.reference is None else self.reference

    @property
    def folder(self) -> str:
        """Folder name that keeps the files of the two runs of a pair apart."""
        return "ours" if self.reference is None else "reference"


P2 = {"pipeline_parallel_size": 2, "num_microbatches": 2}
ONE, DDP = Place(reference="auto"), Place(world_size=2, reference="ddp")
PLACES = {
    "one": (Place(), ONE),
    "m3": (Place(layout={"num_microbatches": 3}), ONE),
    "d2": (Place(world_size=2), DDP),
    "p2": (Place(world_size=2, layout=P2), ONE),
    "one m2": (Place(layout={"num_microbatches": 2}), ONE),
    "d2 m2": (Place(world_size=2, layout={"num_microbatches": 2}), DDP),
    "d2 sharded": (Place(world_size=2, layout={"shard": "optimizer"}), DDP),
    "d2 m2 sharded": (
        Place(world_size=2, layout={"num_microbatches": 2, "shard": "optimizer"}),
        DDP,
    ),
}


class Conformance:
    """Runs of a function under PTDPStrategy, paired with runs under Lightning's own strategies."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._expected: dict[str, list[Any]] = {}

    def ranks(self, function: Callable[..., Any], place: Place, *args: Any) -> list[Any]:
        """Return ``function(rank, place, *args)`` for all ranks, each seeded with 1."""
        seeded = functools.partial(_seeded, function)
        return self.pool.run(seeded, world_size=place.world_size, args=(place, *args))

    def expected(self, function: Callable[..., Any], place: Place, *args: Any) -> list[Any]:
        """Return the results of all ranks, computed once per session."""
        key = repr((function.__module__, function.__qualname__, place, args))
        if key not in self._expected:
            self._expected[key] = self.ranks(function, place, *args)
        return self._expected[key]

    def pairs(
        self,
        function: Callable[..., Any],
        place: str | Place | tuple[Place, Place],
        *args: Any,
    ) -> list[tuple[Any, Any]]:
        """Return each rank's result with the expected one, by default that of a single process."""
        if isinstance(place, str):
            place = PLACES[place]
        ours, reference = (place, ONE) if isinstance(place, Place) else place
        found = self.ranks(function, ours, *args)
        expected = self.expected(function, reference, *args)
        if len(expected) < len(found):
            expected = expected * len(found)
        return list(zip(found, expected, strict=True))

    def check(
        self,
        function: Callable[..., Any],
        place: str | Place | tuple[Place, Place],
        *args: Any,
        tolerance: float = 1e-5,
    ) -> list[tuple[Any, Any]]:
        """Assert that each rank's result is near the expected one; return the pairs."""
        pairs = self.pairs(function, place, *args)
        for found, expected in pairs:
            assert_near(found, expected, tolerance)
        return pairs


def _seeded(function: Callable[..., Any], rank: int, *args: Any) -> Any:
    L.seed_everything(1, verbose=False)
    return function(rank, *args)


def samples(count: int = 32) -> TensorDataset:
    """Return a regression problem. Its rows differ, so a wrong order or split is detected."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(
        x, x[:, :3].sum(-1, keepdim=True).tanh() + 0.1 * torch.arange(count)[:, None] / count
    )


def loader(count: int = 32, batch_size: int = 8, **kwargs: Any) -> DataLoader:
    return DataLoader(samples(count), batch_size=batch_size, **kwargs)


def layers(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 1),
    )


class LitNet(L.LightningModule):
    """An ordinary module around an ``nn.Sequential``, without any code for ranks."""

    def __init__(self):
        super().__init__()
        self.net = layers()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-5)


class Losses(L.Callback):
    """Records the loss of every training batch."""

    def __init__(self):
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.values.append(float(outputs["loss"]))


def make_trainer(place: Place, **kwargs: Any) -> L.Trainer:
    """Return a quiet Trainer of two epochs."""
    usual = {"max_epochs": 2, "log_every_n_steps": 1}
    return parity.make_trainer(place.strategy, place.world_size, **(usual | kwargs))


def weights(trainer: Any) -> dict[str, Tensor]:
    """Return the full state dict in any layout."""
    if hasattr(trainer.strategy, "gather_state_dict"):
        return trainer.strategy.gather_state_dict()
    return {
        name: value.detach().clone()
        for name, value in trainer.lightning_module.state_dict().items()
    }


def metrics(trainer: Any) -> dict[str, dict[str, float]]:
    """Return the metrics of loggers, the progress bar and callbacks."""
    kinds = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
    return {kind: {k: float(v) for k, v in getattr(trainer, kind).items()} for kind in kinds}


def assert_near(found: Any, expected: Any, tolerance: float, where: str = "the result") -> None:
    """Compare the tensors and floats of nested results within a tolerance, all else exactly."""
    match expected:
        case dict():
            assert found.keys() == expected.keys(), where
            for name, value in expected.items():
                assert_near(found[name], value, tolerance, f"{where}[{name!r}]")
        case list() | tuple():
            assert len(found) == len(expected), where
            for index, value in enumerate(expected):
                assert_near(found[index], value, tolerance, f"{where}[{index}]")
        case Tensor():
            torch.testing.assert_close(
                found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}"
            )
        case float():
            assert found == pytest.approx(expected, rel=tolerance, abs=1e-7), where
        case _:
            assert found == expected, where


def assert_weights(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float = 1e-5
) -> None:
    assert_near(found, expected, tolerance)


class LitBackbone(LitNet):
    """A backbone, which BackboneFinetuning freezes at first, and a head."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, FEATURES))

    def training_step(self, batch, batch_idx):
        return super().training_step((self.backbone(batch[0]), batch[1]), batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam(
            filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2, eps=1e-5
        )
