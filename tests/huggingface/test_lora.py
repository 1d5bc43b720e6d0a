"""Adapters of peft in somebody's LightningModule: trained in every layout as on one process (gradients in float64: test_exact)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.huggingface.runs import Run, check
from tests.pool import Pool

pytest.importorskip("peft")


def adapted(model: str = "llama", layout: dict[str, Any] | None = None, **options: Any) -> Run:
    return Run(model=model, options=(("lora", tuple(options.items())),), layout=layout or {})


@pytest.mark.parametrize("layout", ["t2", "t2sp", "p2v2", "t2p2", "d2 sharded", "c2"])
def test_layouts(layout: str, pool: Pool, reference: Any) -> None:
    check(pool, reference, adapted(target_modules=r".*(_proj|lm_head|embed_tokens)"), layout)


@pytest.mark.parametrize("layout", ["t2", "t2sp"])
def test_adapters_drop_the_same(layout: str, pool: Pool, reference: Any) -> None:
    check(pool, reference, adapted("gpt2", {"keyed_dropout": True}, lora_dropout=0.1, init_lora_weights="gaussian"), layout)
