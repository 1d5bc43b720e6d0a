"""Half precision: master weights that keep small updates, and a common loss scale."""

from collections import Counter
from dataclasses import dataclass, replace

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptdp.strategy import PTDPStrategy
from tests.conformance.toys import LitNet, loader
from tests.letters import SP, D, M, P, S, T, V, Z
from tests.parity import assert_near, distance, make_trainer
from tests.tiny_gpt import Run

pytestmark = pytest.mark.thorough

LAYOUTS = {
    "m4": (1, {M: 4}),
    "d2": (2, {M: 2}),
    "d2 sharded": (2, {Z: "optimizer", M: 2}),
    "d4 sharded": (4, {Z: "optimizer", M: 1}),
    "d4 sharded in two levels": (4, {Z: "optimizer", D: 2, M: 1}),
    "d2p2 sharded": (4, {Z: "optimizer", P: 2, M: 2}),
    "d2p2v2 zb_v sharded": (4, {Z: "optimizer", P: 2, V: 2, M: 2, S: "zb_v"}),
}
RUN = Run(accumulate=2, count_tokens=False, ignore_padding=False)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_half_precision_with_masters_matches_reference_runs(name, precision, parity):
    """Microbatch sizes equal the reference run's, so only the order of float32 sums differs."""
    run = replace(RUN, layout={M: 4}, precision=precision)
    expected, exact = parity.result(run), parity.result(RUN)
    for found in parity.ranks(run.on(LAYOUTS[name])):
        assert_near(found["losses"], expected["losses"], 1e-2, "losses")
        assert_near(found["losses"], exact["losses"], 3e-2, "losses")
        assert distance(found["final"], expected["final"]) < 4e-3
        assert distance(found["final"], exact["final"]) < 2e-2


def _overflow(rank, world_size, layout, precision):
    """Return the scale, and whether the parameters changed, for every step.

    The last rank's gradient overflows in the second step.
    """
    L.seed_everything(1, verbose=False)
    module = LitNet()
    seen = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, *_):
            self.before = trainer.strategy.gather_state_dict()
            if trainer.global_step == 0 and rank == world_size - 1:
                first = next(p for p in module.parameters() if p.requires_grad)
                first.register_hook(
                    lambda gradient: gradient * float("inf") if len(seen) == 1 else gradient
                )

        def on_train_batch_end(self, trainer, *_):
            after = trainer.strategy.gather_state_dict()
            moved = any(not torch.equal(after[name], self.before[name]) for name in after)
            seen.append((trainer.precision_plugin.scaler.get_scale(), moved))

    mixed = precision == "16-mixed"
    trainer = make_trainer(
        PTDPStrategy(**layout),
        world_size,
        max_steps=3,
        # The precision string becomes bf16-mixed on a CPU; the plugin does not.
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))]
        if mixed
        else [],
        precision=None if mixed else precision,
        callbacks=[Watch()],
    )
    trainer.fit(module, loader())
    return [scale for scale, _ in seen], [moved for _, moved in seen]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, {}), (2, {Z: "optimizer"}), (2, {P: 2, M: 2}), (4, {P: 2, M: 2, Z: "optimizer"})],
    ids=["d2", "d2 sharded", "p2", "d2p2 sharded"],
)
def test_overflow_on_one_rank_skips_step_on_all_ranks(world_size, layout, pool):
    found = pool.run(_overflow, world_size=world_size, args=(world_size, layout, "16-mixed"))
    assert found == [([64.0, 32.0, 32.0], [True, False, True])] * world_size


def test_true_half_precision_scales_loss(pool):
    for scales, moved in pool.run(_overflow, world_size=2, args=(2, {Z: "optimizer"}, "16-true")):
        assert not moved[1]
        assert scales[1] == scales[0] / 2


class _Casts(TorchDispatchMode):
    """Counts casts of the module's parameters to bfloat16."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._names = {p.untyped_storage()._cdata: name for name, p in module.named_parameters()}
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and kwargs["dtype"] is torch.bfloat16:
            self.counts[self._names.get(args[0].untyped_storage()._cdata, "other")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("recompute", "casts"), [("none", 1), ("full", 8)], ids=["kept", "to save memory"]
)
def test_microbatches_share_cast_weights(recompute, casts):
    """Four microbatches; "full" recomputation casts again, and keeps no copies."""
    module = LitNet()
    strategy = PTDPStrategy(num_microbatches=4, recompute=recompute)
    trainer = make_trainer(strategy, max_steps=2, precision="bf16-mixed")
    with _Casts(module) as counted:
        trainer.fit(module, loader())
    del counted.counts["other"]
    assert counted.counts == dict.fromkeys(dict(module.named_parameters()), 2 * casts)


@dataclass(frozen=True, kw_only=True)
class CountedCasts(Run):
    """Counts the casts of this rank's matrices in its last step."""

    def make_callbacks(self):
        return [_CountsCasts()]

    def results(self, trainer, module):
        matrices = [name for name, p in module.model.blocks.named_parameters() if p.dim() > 1]
        (found,) = (c for c in trainer.callbacks if isinstance(c, _CountsCasts))
        return {"casts": {name: found.casts.counts[name] for name in matrices}}


class _CountsCasts(L.Callback):
    def on_train_batch_start(self, trainer, module, *_):
        self.casts = _Casts(module.model.blocks)
        self.casts.__enter__()

    def on_train_batch_end(self, *_):
        self.casts.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ((2, {T: 2, M: 4}), {}),
        ((2, {T: 2, SP: True, M: 4}), {}),
        ((2, {P: 2, M: 4, S: "zb_h1"}), {}),
        ((1, {M: 4}), {"llama": True, "experts": 4}),
        ((2, {T: 2, M: 4}), {"llama": True, "experts": 4}),
    ],
    ids=["t2", "t2 sp", "zb_h1", "experts", "t2 experts"],
)
def test_products_of_this_package_share_cast_weights(place, options, parity):
    """Experts are cast with gradients, and by the recomputation of nobody else."""
    run = CountedCasts(precision="bf16-mixed", steps=2, **options)
    for found in parity.ranks(run.on(place)):
        assert found["casts"]
        assert set(found["casts"].values()) == {1}, found["casts"]


class LitFused(LitNet):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def test_fused_optimizer_trains_with_gradient_clipping():
    """Lightning's plugin refuses this in the first step, even without a loss scale."""
    trainer = make_trainer(
        PTDPStrategy(),
        max_steps=2,
        precision="bf16-mixed",
        gradient_clip_val=1e-3,
    )
    trainer.fit(LitFused(), loader())
    assert trainer.global_step == 2
