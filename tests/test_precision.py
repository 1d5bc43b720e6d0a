"""Half precision: masters that keep small updates, and a loss scale that no rank changes alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_ptdp.strategy import PTDPStrategy
from tests.conformance.toys import LitNet, loader
from tests.letters import D, M, P, S, V, Z
from tests.parity import Frozen, Run, fit
from tests.pool import Pool

pytestmark = pytest.mark.thorough

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "m4": (1, {M: 4}),
    "d2": (2, {M: 2}),
    "d2 sharded": (2, {Z: True, M: 2}),
    "d4 sharded": (4, {Z: True, M: 1}),
    "d4 sharded in two levels": (4, {Z: True, D: 2, M: 1}),
    "d2p2 sharded": (4, {Z: True, P: 2, M: 2}),
    "d2p2v2 zb_v sharded": (4, {Z: True, P: 2, V: 2, M: 2, S: "zb_v"}),
}
SETTINGS: dict[str, Any] = {
    "steps": 8,
    "accumulate": 2,
    "count_tokens": False,
    "ignore_padding": False,
}


@pytest.fixture(scope="module")
def reference(pool: Pool) -> Any:
    @cache
    def one_process(run: Run) -> dict[str, Any]:
        return pool.run(fit, world_size=1, args=(run,))[0]

    return lambda **kwargs: one_process(Frozen(**kwargs))


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_in_half_precision_with_masters(
    name: str, precision: str, pool: Pool, reference: Any
) -> None:
    """Microbatches of the same size as in the reference, so that only the order of float32 sums
    differs."""
    world_size, layout = LAYOUTS[name]
    run = Run(world_size=world_size, layout=layout, precision=precision, **SETTINGS)
    expected = reference(layout={M: 4}, precision=precision, **SETTINGS)
    exact = reference(**SETTINGS)
    for found in pool.run(fit, world_size=world_size, args=(run,)):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-2)
        assert found["losses"] == pytest.approx(exact["losses"], rel=3e-2)
        assert _distance(found["final"], expected["final"]) < 4e-3
        assert _distance(found["final"], exact["final"]) < 2e-2


def _distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Between whole models, relatively: single elements with hardly any gradient may go either
    way."""
    names = expected.keys()
    left, right = (
        torch.cat([state[name].double().flatten() for name in names]) for state in (found, expected)
    )
    return float((left - right).norm() / right.norm())


def _overflow(
    rank: int, world_size: int, layout: dict[str, Any], precision: str
) -> tuple[list[float], list[bool]]:
    """Scale and whether the parameters moved, for every step; the last rank's gradient overflows in
    the second."""
    L.seed_everything(1, verbose=False)
    module = LitNet()
    seen: list[tuple[float, bool]] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.before = trainer.strategy.gather_state_dict()
            if trainer.global_step == 0 and rank == world_size - 1:
                first = next(p for p in module.parameters() if p.requires_grad)
                first.register_hook(
                    lambda gradient: gradient * float("inf") if len(seen) == 1 else gradient
                )

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            after = trainer.strategy.gather_state_dict()
            moved = any(not torch.equal(after[name], self.before[name]) for name in after)
            seen.append((trainer.precision_plugin.scaler.get_scale(), moved))

    mixed = precision == "16-mixed"
    trainer = L.Trainer(
        strategy=PTDPStrategy(**layout),
        accelerator="cpu",
        devices=world_size,
        max_steps=3,
        # The precision string becomes bf16-mixed on a CPU; the plugin does not.
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))]
        if mixed
        else [],
        precision=None if mixed else precision,
        callbacks=[Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader())
    return [scale for scale, _ in seen], [moved for _, moved in seen]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, {}), (2, {Z: True}), (2, {P: 2, M: 2}), (4, {P: 2, M: 2, Z: True})],
    ids=["d2", "d2 sharded", "p2", "d2p2 sharded"],
)
def test_an_overflow_on_one_rank_is_everyones(
    world_size: int, layout: dict[str, Any], pool: Pool
) -> None:
    found = pool.run(_overflow, world_size=world_size, args=(world_size, layout, "16-mixed"))
    assert found == [([64.0, 32.0, 32.0], [True, False, True])] * world_size


def test_half_precision_alone_scales_its_loss_too(pool: Pool) -> None:
    for scales, moved in pool.run(_overflow, world_size=2, args=(2, {Z: True}, "16-true")):
        assert not moved[1]
        assert scales[1] == scales[0] / 2


class LitFused(LitNet):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def test_gradients_of_a_fused_optimizer_are_clipped() -> None:
    """Lightning's plugin refuses that in the first step, even in bfloat16, where no scale is."""
    trainer = L.Trainer(
        strategy=PTDPStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=2,
        precision="bf16-mixed",
        gradient_clip_val=1e-3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitFused(), loader())
    assert trainer.global_step == 2
