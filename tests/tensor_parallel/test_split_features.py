"""Functions of features of which each tensor rank has a part, and parameters applied to them."""

from dataclasses import dataclass
from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_ptdp import ParallelPlan
from lightning_ptdp.tensor_parallel import Column, PerRank
from tests.letters import T
from tests.parity import Training

WIDTH, INNER = 8, 32


class Block(nn.Module):
    def __init__(self, between, outputs, extra):
        super().__init__()
        self.between = between
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER)
        self.extra, self.down = extra(), nn.Linear(outputs, WIDTH)

    def forward(self, x):
        return x + self.down(self.between(self.up(self.norm(x)), self.extra))


class LitBlocks(L.LightningModule):
    def __init__(self, between, outputs=INNER, extra=nn.Identity, kinds=None, numbers=None):
        super().__init__()
        self.numbers = numbers or {}
        self.h = nn.ModuleList(Block(between, outputs, extra) for _ in range(2))
        self.kinds = kinds

    def configure_parallel(self):
        return ParallelPlan(
            blocks="h",
            tensor={"h.*.up": "column", "h.*.down": "row", **(self.kinds or {})},
            numbers=self.numbers,
        )

    def training_step(self, batch, batch_idx):
        x = batch
        for block in self.h:
            x = block(x)
        return F.mse_loss(x, batch.flip(-1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@torch.no_grad()
def without_gradients(h, extra):
    return extra(h)


def halves(h, extra):
    a, b = h.chunk(2, -1)
    return F.silu(a) * b


HALF = {"outputs": INNER // 2}
REFUSED = {
    "chunk": (halves, HALF),
    "glu": (lambda h, extra: F.glu(h), HALF),
    "softmax": (lambda h, extra: h.softmax(-1), {}),
    "mean": (lambda h, extra: h.relu() - h.mean(-1, keepdim=True), {}),
    "layer_norm": (lambda h, extra: F.layer_norm(h.relu(), h.shape[-1:]), {}),
    "normalize": (lambda h, extra: F.normalize(h, dim=-1), {}),
    "roll": (lambda h, extra: h.roll(1, -1), {}),
    "pad": (lambda h, extra: F.pad(h, (1, -1)), {}),
    "__getitem__": (lambda h, extra: h * h[..., :1], {}),
    "max": (lambda h, extra: h / h.max(), {}),
    "matmul": (lambda h, extra: torch.matmul(h, h.mT) @ h, {}),
    "einsum": (lambda h, extra: torch.einsum("bqf,bkf->bqk", h, h) @ h, {}),
    "scaled_dot_product_attention": (
        lambda h, extra: F.scaled_dot_product_attention(h, h, h),
        {},
    ),
}


class Heads(nn.Module):
    """Distribution over the features of each of four heads."""

    def __init__(self, *sizes):
        super().__init__()
        self.heads, self.sizes = 4, sizes

    def forward(self, h):
        parts = h.reshape(*h.shape[:-1], *(self.sizes or (self.heads, -1)))
        return parts.softmax(-1).flatten(-2)


class WholeHeads(Heads):
    def __init__(self):
        super().__init__(4, INNER // 4)


class CountedHeads(Heads):
    def __init__(self):
        super().__init__(-1, INNER // 4)


class ConfiguredHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(n_head=4, n_layer=2)

    def forward(self, h):
        parts = h.reshape(*h.shape[:-1], self.config.n_head, -1)
        return parts.softmax(-1).flatten(-2)


def heads_of_parts(h, extra):
    return sum(extra(part) for part in h.chunk(2, -1))


PARTS = {**HALF, "kinds": {"h.*.up": Column(parts=(INNER // 2,) * 2)}}
OF_HEADS = {
    "all heads": (lambda h, extra: extra(h), {"extra": Heads}),
    "all heads of parts": (heads_of_parts, {"extra": Heads, **PARTS}),
    "sizes": (lambda h, extra: extra(h), {"extra": WholeHeads}),
    "config": (lambda h, extra: extra(h), {"extra": ConfiguredHeads}),
}
WRONG_HEADS = {
    "sizes": "with the sizes (8, 3, 4, 8)",
    "config": "which ConfiguredHeads.config.n_head",
}
DIVIDED = {"numbers": {"h.*.extra": {"heads": PerRank()}}}
EQUAL = {
    "elementwise": (lambda h, extra: F.gelu(h) * h[..., ::1].sigmoid() + h.clamp(max=1), {}),
    "of heads": (lambda h, extra: h.reshape(*h.shape[:-1], -1, 4).softmax(-1).flatten(-2), {}),
    "of parts": (halves, PARTS),
    "counted heads": (lambda h, extra: extra(h), {"extra": CountedHeads}),
    "divided heads": (lambda h, extra: extra(h), {"extra": Heads, **DIVIDED}),
    "divided heads of parts": (heads_of_parts, {"extra": Heads, **PARTS, **DIVIDED}),
    "partial": (lambda h, extra: extra(h), {"extra": nn.PReLU, "kinds": {"h.*.extra": "partial"}}),
    "dtype of a parameter": (
        lambda h, extra: h.type_as(extra.weight).to(extra.weight) + 0 * h.detach(),
        {"extra": lambda: nn.LayerNorm(3)},
    ),
    "frozen copy": (lambda h, extra: h + without_gradients(h, extra), {"extra": nn.PReLU}),
}


class HeadNorm(nn.Module):
    """Norm of the features of each of eight heads."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(INNER // 8)

    def forward(self, h):
        return self.norm(h.reshape(*h.shape[:-1], -1, INNER // 8)).flatten(-2)


class LearnedSlope(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(1))

    def forward(self, h):
        return h.relu() * F.softplus(self.slope)


class WholeScale(nn.Module):
    """Factors of all features, and of all heads."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("scale", torch.ones(*shape or (INNER,)))

    def forward(self, h):
        parts = h.reshape(*h.shape[:-1], -1, INNER // 8) if self.scale.dim() > 1 else h
        return (parts * self.scale).reshape(h.shape)


class WholeHeadScale(WholeScale):
    def __init__(self):
        super().__init__(8, 1)


UNDECLARED = {
    "activation": (nn.PReLU, "prelu", "weight"),
    "norm of heads": (HeadNorm, "layer_norm", "norm.weight"),
    "slope": (LearnedSlope, "mul", "slope"),
}
LARGER = {
    "scale of features": (WholeScale, "and (32,)"),
    "scale of heads": (WholeHeadScale, "and (8, 1)"),
}
CASES = (
    REFUSED
    | OF_HEADS
    | EQUAL
    | {
        name: (lambda h, extra: extra(h), {"extra": extra})
        for name, (extra, *_) in (UNDECLARED | LARGER).items()
    }
)


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    case: str

    always_clips = False

    def make_module(self):
        between, options = CASES[self.case]
        return LitBlocks(between, **options)

    def make_data(self):
        shape = (self.steps * self.global_batch, 3, WIDTH)
        return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def refused(rank, run):
    trainer = run.make_trainer()
    with pytest.raises((ValueError, RuntimeError)) as error:
        trainer.fit(run.make_module(), *run.make_loaders(trainer))
    return str(error.value)


@pytest.fixture
def messages(pool, name):
    """Return each tensor rank's refusal of the case."""
    return pool.run(refused, world_size=2, args=(Run(case=name).on((2, {T: 2})),))


@pytest.mark.parametrize("name", REFUSED)
def test_function_of_split_features_is_refused_with_its_line(name, messages):
    for message in messages:
        assert "test_split_features.py, line" in message
        assert f"calls {name} over the features of 'h.0.up'" in message


@pytest.mark.parametrize("name", OF_HEADS)
def test_heads_of_whole_layer_are_refused_with_remedy(name, messages):
    wrong = WRONG_HEADS.get(name, "which Heads.heads counts")
    for message in messages:
        assert "calls reshape" in message and wrong in message
        assert "'h.0.up'" in message and "reshape(..., -1, head_size)" in message


@pytest.mark.parametrize("name", EQUAL)
def test_functions_of_own_features_match_single_process(name, parity):
    parity.check(Run(case=name), (2, {T: 2}))


@pytest.mark.parametrize("name", UNDECLARED)
def test_undeclared_parameter_of_split_features_is_refused(name, messages):
    """Each rank would get a part of its gradient, without an error."""
    _, function, parameter = UNDECLARED[name]
    for message in messages:
        assert f"calls {function} on features of 'h.0.up'" in message
        assert f"on 'h.0.extra.{parameter}'" in message
        assert "Declare its module as 'partial'" in message


@pytest.mark.parametrize("name", LARGER)
def test_tensor_of_all_features_is_refused(name, messages):
    _, shape = LARGER[name]
    for message in messages:
        assert "calls mul on tensors" in message and shape in message
        assert "of one and of all 2 tensor ranks" in message
