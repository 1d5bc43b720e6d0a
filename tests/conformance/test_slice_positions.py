"""Models that count positions from the length of a slice of the sequence."""

from dataclasses import dataclass

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_ptdp import ParallelPlan
from lightning_ptdp.attention import ContextParallelError
from lightning_ptdp.base.partial_values import PartialModelError
from lightning_ptdp.forward.token_mixing import TokenMixing
from tests.letters import SP, C, T
from tests.parity import Training

VOCABULARY, LENGTH, LONGEST, WIDTH = 40, 12, 20, 8
SLICE = LENGTH // 2


class Sinusoids(nn.Module):
    """The encoding of torch's tutorial on transformers."""

    def __init__(self):
        super().__init__()
        angles = torch.arange(LONGEST)[:, None] * torch.logspace(0, -2, WIDTH)
        self.register_buffer("table", angles.sin())

    def forward(self, x):
        return x + self.table[: x.size(1)]


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, LONGEST * WIDTH).view(1, LONGEST, WIDTH))

    def forward(self, x):
        return x + self.table[:, : x.shape[1]]


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(LONGEST, WIDTH)

    def forward(self, x):
        return x + self.places(torch.arange(x.size(1), device=x.device).unsqueeze(0))


class Stored(Embedded):
    """Positions in a buffer of integers, as in BERT."""

    def __init__(self):
        super().__init__()
        self.register_buffer("position_ids", torch.arange(LONGEST)[None])

    def forward(self, x):
        return x + self.places(self.position_ids[:, : x.size(1)])


class Counted(Embedded):
    """Positions of the tokens that are not padding, as Hugging Face's users compute them."""

    def forward(self, x):
        mask = torch.ones(x.shape[:2], dtype=torch.long)
        return x + self.places((mask.cumsum(-1) - 1).masked_fill(mask == 0, 1))


class Rotary(nn.Module):
    def forward(self, x):
        angles = torch.outer(torch.arange(x.size(1)).float(), torch.logspace(0, -2, WIDTH))
        return x * angles.cos() + x.roll(1, -1) * angles.sin()


class Segments(nn.Module):
    """One type for all tokens, in a buffer that is as long as the longest sequence."""

    def __init__(self):
        super().__init__()
        self.types = nn.Embedding(LONGEST, WIDTH)
        self.register_buffer("type_ids", torch.zeros(1, LONGEST, dtype=torch.long))

    def forward(self, x):
        return x + self.types(self.type_ids[:, : x.size(1)])


class Masked(nn.Module):
    """Numbers of tokens that are only compared with each other, or choose rows of the slice."""

    def forward(self, x):
        places = torch.arange(x.size(1))
        documents = torch.zeros(x.shape[:2], dtype=torch.bool).cumsum(-1)
        is_first = (documents == documents[:1, :1]).unsqueeze(-1)
        return x * (places[:, None] >= places[:1]) * is_first + x[:, places] * 0


class Lengths(nn.Module):
    """Sequences with lengths."""

    def forward(self, x):
        lengths = torch.full((len(x), 1), SLICE + 1)
        return x * (torch.arange(x.size(1)) < lengths).unsqueeze(-1)


COUNTING = (Sinusoids, Learned, Embedded, Stored, Counted, Rotary, Lengths)
HARMLESS = (Segments, Masked)


class Block(nn.Module):
    def __init__(self, places):
        super().__init__()
        self.places = places
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(3 * WIDTH, WIDTH),
        )

    def forward(self, x):
        x = self.places(x)
        attended = F.scaled_dot_product_attention(x, x, x, is_causal=True) if self.attends else 0
        return x + attended + self.down(F.gelu(self.up(self.norm(x))))


class LitPlaces(L.LightningModule):
    """The positions are added before the blocks, or in each of them."""

    def __init__(self, places, *, inside, attends):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Identity() if inside else places()
        self.blocks = nn.ModuleList(Block(places() if inside else nn.Identity()) for _ in range(2))
        for block in self.blocks:
            block.attends = attends
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def configure_parallel(self):
        return ParallelPlan(
            blocks="blocks",
            tensor={
                "tokens": "vocabulary",
                "blocks.*.up": "column",
                "blocks.*.down": "row",
                "head": "vocabulary",
            },
        )

    def training_step(self, batch, batch_idx):
        x = self.places(self.tokens(batch["ids"]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    places: type[nn.Module]
    inside: bool

    def make_module(self):
        return LitPlaces(self.places, inside=self.inside, attends=C in self.layout)

    def make_data(self):
        count = self.steps * self.global_batch
        rows = torch.randint(
            0, VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(3)
        )
        return [
            # A batch has positions, whether the model reads them or not.
            {"ids": row[:-1], "labels": row[1:], "position_ids": torch.arange(LENGTH)}
            for row in rows
        ]


def refusal(rank, run, error):
    trainer = run.make_trainer()
    with pytest.raises(error) as caught:
        trainer.fit(run.make_module(), DataLoader(run.make_data(), batch_size=4))
    return str(caught.value)


@pytest.mark.parametrize("inside", [False, True], ids=["before blocks", "in blocks"])
@pytest.mark.parametrize("places", COUNTING)
def test_positions_of_slice_are_refused_under_sequence_parallelism(places, inside, pool):
    run = Run(places=places, inside=inside).on((2, {T: 2, SP: True}))
    for told in pool.run(refusal, world_size=2, args=(run, PartialModelError)):
        assert "test_slice_positions.py, line" in told and "counts positions from 0" in told
        assert "ParallelPlan(sequence='blocks')" in told


@pytest.mark.parametrize("places", COUNTING)
def test_positions_of_slice_are_refused_under_context_parallelism(places, pool):
    run = Run(places=places, inside=False).on((2, {C: 2}))
    for told in pool.run(refusal, world_size=2, args=(run, ContextParallelError)):
        assert "counts positions from 0" in told and "use these positions" in told


@pytest.mark.parametrize("places", HARMLESS)
def test_numbers_of_tokens_that_are_no_positions_match_single_process(places, parity):
    parity.check(Run(places=places, inside=True), (2, {T: 2, SP: True}))


def test_numbers_that_are_not_of_slice_are_accepted():
    table = nn.Parameter(torch.zeros(LONGEST, WIDTH))
    watch = TokenMixing(
        ValueError, refused_positions=ValueError, sizes=(WIDTH,), tokens=SLICE, samples=3
    )
    with watch:
        F.embedding(torch.arange(LENGTH), table)  # the whole sequence
        F.embedding(torch.arange(1, SLICE), table)
        table[:LENGTH], table[SLICE:]
        F.embedding(torch.arange(SLICE), torch.zeros(SLICE, WIDTH))  # of the slice
        torch.arange(0, 2 * SLICE, 2).float().cos()  # frequencies
        with pytest.raises(ValueError, match="counts positions from 0"):
            F.embedding(torch.arange(0, SLICE, 1)[None], table)


@pytest.mark.parametrize("shape", [(LENGTH, WIDTH), (1, LENGTH, WIDTH), (3, LENGTH, 1)])
def test_tensor_of_all_tokens_beside_slice_is_refused(shape):
    """An embedding of positions that the plan does not name has the whole sequence."""
    watch = TokenMixing(
        ValueError, refused_positions=ValueError, sizes=(WIDTH,), tokens=SLICE, samples=3
    )
    hidden = torch.zeros(3, SLICE, WIDTH)
    with watch, pytest.raises(ValueError, match=r"calls add on tensors \(3, .*and"):
        hidden + torch.zeros(shape)
    with watch, pytest.raises(RuntimeError, match="must match"):  # another error
        hidden + torch.zeros(SLICE, WIDTH + 1)


def causal(order, **options):
    return torch.ones(LONGEST, LONGEST, **options).tril(order)


def tables():
    distance = torch.arange(LONGEST)[:, None] - torch.arange(LONGEST)
    hidden = torch.full((LONGEST, LONGEST), -torch.inf).triu(1)
    window = (distance >= 0) & (distance < SLICE)
    return {
        "boolean": (causal(0, dtype=torch.bool), True),
        "additive": (hidden, True),
        "of heads": (causal(0)[None, None], True),
        "window": (window, False),
        "additive window": (torch.zeros(LONGEST, LONGEST).where(window, -torch.inf), False),
        "slopes": (-distance.abs() * torch.tensor([0.5, 0.25])[:, None, None], False),
    }


def watched():
    watch = TokenMixing(
        ValueError, refused_positions=ValueError, sizes=(WIDTH,), tokens=SLICE, samples=3
    )
    watch.length = LENGTH
    return watch


@pytest.mark.parametrize("name", tables())
def test_table_of_mask_is_accepted_if_it_is_causal(name):
    table, is_accepted = tables()[name]

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", table)

        def forward(self):
            return self.table[..., :SLICE, :SLICE]

    with watched():
        if is_accepted:
            Table()()
            return
        with pytest.raises(ValueError, match="counts positions from 0"):
            Table()()


@pytest.mark.parametrize(
    ("compare", "is_accepted"),
    {
        "causal": (lambda i: i[None] <= i[:, None], True),
        "strictly less": (lambda i: i < (i + 1).view(SLICE, 1), True),
        "from 1": (lambda i: (i + 1)[None] <= (i + 1)[:, None], True),
        "transposed": (lambda i: i[None] <= i[None].T, True),
        "exchanged": (lambda i: i[None].tile(SLICE, 1) >= i[None].transpose(0, 1), True),
        "less than 1": (lambda i: i - i[:, None] < 1, True),
        "causal distance": (lambda i: i[:, None] - i >= 0, True),
        "long window": (lambda i: i[None] > i[:, None] - LENGTH, True),
        "longer than sequence": (lambda i: i < LENGTH, True),
        "any position": (lambda i: i >= 0, True),
        "window": (lambda i: i[None] > i[:, None] - SLICE, False),
        "distance": (lambda i: (i[:, None] - i).abs() < SLICE, False),
        "blocks": (lambda i: i[None] // SLICE == i[:, None] // SLICE, False),
        "lengths": (lambda i: i < torch.tensor([[7], [9], [8]]), False),
        "first token": (lambda i: i > 0, False),
        "triangles": (lambda i: torch.ones(SLICE, SLICE).tril().triu(1), True),
        "band": (lambda i: torch.ones(SLICE, SLICE).tril().triu(-SLICE), False),
        "weights": (lambda i: torch.ones(3, SLICE) * torch.linspace(0, 1, SLICE), False),
    }.values(),
)
def test_comparison_with_tokens_of_other_slices_is_refused(compare, is_accepted):
    with watched():
        if is_accepted:
            compare(torch.arange(SLICE))
            return
        with pytest.raises(ValueError, match="counts positions from 0"):
            compare(torch.arange(SLICE))
