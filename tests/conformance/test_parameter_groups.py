"""Parameter groups of a split model have the members, options and schedules of the whole one."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.conformance.blocks import LAYOUTS, LitBlocks, batches, run_refused
from tests.conformance.toys import Losses, assert_weights, make_trainer, weights

pytestmark = pytest.mark.thorough

ADAM = {"lr": 1e-2, "eps": 1e-5}


class LitLayerwise(LitBlocks):
    """Learning rates that decrease with the distance from the head, each with its own schedule."""

    def configure_optimizers(self):
        groups = [{"params": list(self.wte.parameters()), "lr": 1e-3}]
        for depth, block in enumerate(self.h):
            groups.append(
                {
                    "params": list(block.parameters()),
                    "lr": 1e-2 * 0.5 ** (len(self.h) - depth),
                    "depth": depth,
                }
            )
        groups.append({"params": list(self.norm.parameters()), "lr": 2e-2})
        optimizer = torch.optim.Adam(groups, **ADAM)
        schedule = LambdaLR(
            optimizer, [lambda step, i=i: 1 / (1 + step * i) for i in range(len(groups))]
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LitNamed(LitBlocks):
    """Groups by name, module type and attributes of parameters."""

    def __init__(self):
        super().__init__()
        for parameter in self.h[1].parameters():
            parameter.scale = 3.0

    def configure_optimizers(self):
        linear = {
            f"{name}.weight" for name, child in self.named_modules() if isinstance(child, nn.Linear)
        }
        groups = {}
        for name, parameter in self.named_parameters():
            block = re.match(r"h\.(\d+)", name)
            key = (
                name in linear,
                int(block[1]) % 3 if block else -1,
                getattr(parameter, "scale", 1.0),
            )
            groups.setdefault(key, []).append(parameter)
        return torch.optim.AdamW(
            [
                {
                    "params": members,
                    "lr": 1e-3 * (2 + key[1]) * key[2],
                    "weight_decay": 0.5 * key[0],
                }
                for key, members in groups.items()
            ],
            eps=1e-5,
        )


class LitSized(LitBlocks):
    """Groups by size and shape."""

    def configure_optimizers(self):
        tall = [p for p in self.parameters() if p.dim() == 2 and p.shape[0] > 2 * p.shape[1]]
        large = [
            p for p in self.parameters() if all(p is not q for q in tall) and p.data.numel() > WIDE
        ]
        rest = [p for p in self.parameters() if all(p is not q for q in (*tall, *large))]
        return torch.optim.Adagrad(
            [
                {"params": tall, "lr": 0.3},
                {"params": large, "lr": 0.1},
                {"params": rest, "lr": 0.01},
            ],
            initial_accumulator_value=0.1,
        )


WIDE = 20


class LitFrozen(LitBlocks):
    """Trains one block only."""

    def configure_optimizers(self):
        self.requires_grad_(False)
        self.h[3].requires_grad_(True)
        return torch.optim.SGD(
            filter(lambda p: p.requires_grad, self.parameters()), lr=0.3, momentum=0.9
        )


class LitSome(LitBlocks):
    """The optimizer has the parameters of the first block only."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.h[0].named_parameters(), **ADAM)


class LitMuon(LitBlocks):
    """Trains matrices only, which its optimizer needs whole."""

    def configure_optimizers(self):
        return torch.optim.Muon([p for p in self.h.parameters() if p.dim() == 2], lr=1e-2)


class LitAdafactor(LitBlocks):
    """Trains with running means over rows and columns of whole matrices."""

    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters(), lr=1e-2)


CASES = [
    *((layout, LitMuon) for layout in ("p2v2", "t2", "d2 sharded", "d2p2 sharded")),
    *(("d2 sharded parameters", kind) for kind in (LitMuon, LitAdafactor)),
    *((layout, LitAdafactor) for layout in ("p2", "t2p2", "d2 sharded gradients")),
    *((layout, LitLayerwise) for layout in LAYOUTS),
    *((layout, LitNamed) for layout in ("p2v2", "t2", "d2p2 sharded")),
    *((layout, LitSized) for layout in ("t2", "t2p2", "d2p2 sharded")),
    *((layout, LitFrozen) for layout in ("p2", "d2p2 sharded")),
    *((layout, LitSome) for layout in ("p2v2", "t2p2")),
]


def train(rank, place, kind):
    losses = Losses()
    trainer = make_trainer(
        place,
        callbacks=[losses],
        use_distributed_sampler=False,
        gradient_clip_val=0.2,
        max_epochs=1,
    )
    trainer.fit(kind(), batches(place, rank))
    options = [
        {key: value for key, value in g.items() if "param" not in key}
        for g in trainer.optimizers[0].param_groups
    ]
    return losses.values, weights(trainer), options


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_parameter_groups_train_like_single_process(layout, kind, conformance):
    for (found_losses, found, found_options), (losses, expected, options) in conformance.pairs(
        train, LAYOUTS[layout], kind
    ):
        assert found_options == options
        assert_weights(found, expected)
        assert torch.equal(found["wte.weight"], found["head.weight"])
        if not layout.startswith("d2"):
            assert found_losses == pytest.approx(losses, rel=1e-5)


def save_and_resume(rank, place, kind, path, load):
    file = Path(path, place.folder, "half.ckpt")
    trainer = make_trainer(place, max_epochs=2 if load else 1, use_distributed_sampler=False)
    trainer.fit(kind(), batches(place, rank), ckpt_path=file if load else None)
    if not load:
        trainer.save_checkpoint(file)
    return weights(trainer), [group["lr"] for group in trainer.optimizers[0].param_groups]


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("p2v2", "t2", LitLayerwise),
        ("t2p2", "d2 sharded", LitSized),
        ("d2p2 sharded", "p2", LitLayerwise),
        ("t2p2", "d2 sharded", LitAdafactor),
        ("d2 sharded parameters", "t2", LitAdafactor),
    ],
)
def test_parameter_groups_resume_in_other_layout(first, second, kind, conformance, tmp_path):
    conformance.pairs(save_and_resume, LAYOUTS[first], kind, str(tmp_path), False)
    conformance.check(save_and_resume, LAYOUTS[second], kind, str(tmp_path), True)


class LitRankwise(LitBlocks):
    def configure_optimizers(self):
        first, *others = self.parameters()
        if self.global_rank == 1:
            return torch.optim.SGD([{"params": [first]}, {"params": others[1:]}], lr=0.1)
        return torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.1)


class LitRates(LitBlocks):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1 + 0.1 * self.global_rank)


class LitComputes(LitBlocks):
    """Selects parameters by their values."""

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.data.norm() > 1], lr=0.1)


class ClippingSGD(torch.optim.SGD):
    """Clips by the norm of its parameters."""

    def step(self, closure=None):
        loss = closure()
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()
        return loss


class LitClipping(LitBlocks):
    def configure_optimizers(self):
        return ClippingSGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize(
    ("kind", "layout", "words"),
    [
        (
            LitRankwise,
            "p2",
            "OptimizerGroupsError: parameter group 1 of SGD has 'h.0.norm.weight' on rank 0, but "
            "not on rank 1",
        ),
        (
            LitRates,
            "d2 sharded",
            "OptimizerGroupsError: parameter group 0 of SGD has lr=0.1 on rank 0, but 0.2 on rank "
            "1",
        ),
        (
            LitClipping,
            "p2",
            "MixingOptimizerError: pipeline_parallel_size=2 leaves each rank with some of the "
            "parameters, but Clip",
        ),
        (
            LitComputes,
            "t2",
            "PartialModelError: configure_optimizers computes a number from the values of",
        ),
        (
            LitComputes,
            "p2",
            "PartialModelError: configure_optimizers computes a number from the values of",
        ),
    ],
)
def test_inconsistent_groups_and_mixing_optimizers_are_refused(kind, layout, words, conformance):
    for message in conformance.ranks(run_refused, LAYOUTS[layout], kind):
        assert message.startswith(words)
