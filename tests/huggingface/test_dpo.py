"""Preference tuning equals TRL's on one process, and one process in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_ptdp.models import AdamWConfig, LoraOptions
from lightning_ptdp.models.lit_dpo import LitDPO
from tests.huggingface.runs import LAYOUTS, VOCABULARY, make_model
from tests.parity import Parity, Training, assert_near

pytestmark = pytest.mark.thorough

pytest.importorskip("peft")

LENGTH, PROMPT = 12, 4


class Pairs(Dataset[dict[str, Tensor]]):
    """Random pairs with a common prompt; answers have 3 to 8 tokens."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        prompt = torch.randint(1, VOCABULARY, (PROMPT,), generator=draw)
        pair: dict[str, Tensor] = {}
        for name in ("chosen", "rejected"):
            size = int(torch.randint(3, 9, (), generator=draw))
            answer = torch.randint(1, VOCABULARY, (size,), generator=draw)
            tokens = torch.cat([prompt, answer])
            ids, labels = torch.zeros(LENGTH, dtype=torch.long), torch.full((LENGTH,), -100)
            ids[: len(tokens)] = tokens
            labels[PROMPT - 1 : len(tokens) - 1] = answer
            pair |= {f"{name}_ids": ids, f"{name}_labels": labels}
        return pair


@dataclass(frozen=True, kw_only=True)
class Preferences(Training):
    root: str
    reference: str = "copy"
    adapter: bool = False
    layout: dict[str, Any] = field(default_factory=lambda: {"num_microbatches": 2})
    steps: int = 3
    clip: float | None = 0.5
    validate_every: int | None = 0
    precision: Any = "64-true"

    smallest: ClassVar[float] = 1e-3
    synced: ClassVar[tuple[str, ...]] = ("val_loss", "val_rewards/margins")
    always_clips: ClassVar[bool] = False

    def make_module(self) -> L.LightningModule:
        return LitDPO(
            self.root,
            reference=self.reference,  # type: ignore[arg-type]
            beta=0.5,
            adapter=LoraOptions(r=3, modules_to_save=("norm",), init="gaussian")
            if self.adapter
            else None,
            optimizer=AdamWConfig(learning_rate=5e-3, eps=1e-3, decay_steps=4),
        )

    def make_data(self) -> Dataset:
        return Pairs()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("base") / "llama"
    make_model("llama").save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("reference", "layout"),
    [
        *(("copy", name) for name in ("t2p2", "p2v2", "d2 sharded parameters")),
        *(("adapters_off", name) for name in ("t2p2", "d2 sharded")),
    ],
)
def test_layout_matches_single_process(
    reference: str, layout: str, parity: Parity, root: str
) -> None:
    run = Preferences(root=root, reference=reference, adapter=reference == "adapters_off")
    parity.check(run, LAYOUTS[layout])
