"""Encoder and decoder in one pipeline: every cut of their layers matches the whole model."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_ptdp.pipeline.crossing import StageError
from tests.pipeline.crossing_models import EXACT, WIDTH, Block, Emulated, assert_trains_as

pytestmark = pytest.mark.thorough

CUTS = ((1,), (2,), (3,), (4,), (5,), (6,), (2, 3), (1, 3, 5), (3, 4), (1, 2, 3, 4, 5, 6))
"""First layers of the stages after the first. Layers 0 to 2 are the encoder, 3 to 6 the decoder."""


class EncoderDecoder(nn.Module):
    """Encoder and decoder as in a tutorial.

    Each has an embedding and a list of blocks. A norm follows the encoder.
    """

    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(11, WIDTH), nn.Embedding(11, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 11)

    def encode(self, x):
        for layer in self.encoder:
            x = layer(x)
        return self.norm(x)

    def decode(self, y, memory):
        for layer in self.decoder:
            y = layer(y, memory)
        return self.head(y)

    def forward(self, source, target):
        memory = self.encode(self.source(source))
        return self.decode(self.target(target), memory)


class EmbeddedFirst(EncoderDecoder):
    """Both embeddings are looked up before the encoder runs."""

    def forward(self, source, target):
        x, y = self.source(source), torch.tanh(self.target(target))
        return self.decode(y, self.encode(x))


class SharedEmbedding(EncoderDecoder):
    """Encoder blocks take the mean of the shared embedding, decoder blocks the encoder's output."""

    def forward(self, source, target):
        x = self.source(source)
        mean = x.mean(1, keepdim=True).expand_as(x)
        for layer in self.encoder:
            x = layer(x, other=mean)
        return self.decode(self.source(target), x)


class OneAfterTheOther(EncoderDecoder):
    """The second container continues from the first, as a language model after a vision tower."""

    def forward(self, source, target):
        x = self.encode(self.source(source)) + self.target(target)
        for layer in self.decoder:
            x = layer(x)
        return self.head(x)


class Biased(Block):
    """Block that creates a bias if it receives none, and returns it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        if index == 0:
            self.bias = nn.Embedding(5, WIDTH)

    def forward(self, x, bias=None, memory=None):
        if bias is None:
            bias = self.bias(torch.arange(x.shape[1])).unsqueeze(0)
        return self.mix(x + bias, x if memory is None else memory), bias, None


class Biases(EncoderDecoder):
    """Blocks return a tuple, as in T5."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(Biased(i) for i in range(3))
        self.decoder = nn.ModuleList(Biased(i) for i in range(4))

    def run(self, layers, x, memory=None):
        bias = None
        for layer in layers:
            x, bias, _ = layer(x, bias, memory=memory)
        return x

    def forward(self, source, target):
        memory = self.norm(self.run(self.encoder, self.source(source)))
        return self.head(self.run(self.decoder, self.target(target), memory))


class Torch(nn.Module):
    """``nn.Transformer`` with masks."""

    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(11, 8), nn.Embedding(11, 8)
        self.transformer = nn.Transformer(8, 2, 3, 4, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.float64)
        padding = torch.zeros(source.shape, dtype=torch.float64).masked_fill(
            source == 0, -torch.inf
        )
        x, y = self.source(source), self.target(target)
        found = self.transformer(
            x, y, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding
        )
        return self.head(found)


class Examined(EncoderDecoder):
    """Model with an example input and modules registered in reverse order."""

    example_input_array = (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64))

    def __init__(self):
        super().__init__()
        modules = dict(self._modules)
        self._modules.clear()
        self._modules.update(reversed(modules.items()))


MODELS = (EncoderDecoder, EmbeddedFirst, SharedEmbedding, OneAfterTheOther, Biases, Torch, Examined)


def build(model):
    torch.manual_seed(0)
    return model().double()


def batch(model, samples=2, length=5):
    """Return source and target. Blocks that mix by position need equal lengths."""
    generator = torch.Generator().manual_seed(samples)
    shapes = (samples, length), (samples, length - 1 if model is Torch else length)
    source, target = (torch.randint(0, 11, shape, generator=generator) for shape in shapes)
    source[:, 0] = 1
    return source, target


def ranges(cut):
    return tuple(pairwise((0, *cut, 7)))


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_loss_and_gradients_match_whole_model(model, cut):
    def loss(output, source, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    whole = build(model)
    assert_trains_as(
        whole, Emulated(whole, ranges(cut)), [batch(model, 2, 5), batch(model, 3, 4)], loss
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_prior_training_matches_whole_model(model, context):
    whole = build(model).eval()
    for cut in CUTS:
        with context():
            ids = batch(model)
            found = Emulated(whole, ranges(cut)).forward(*ids, training=False)
            torch.testing.assert_close(found, whole(*ids), **EXACT)


class Repeated(EncoderDecoder):
    """All layers of the encoder are one module."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([self.encoder[0]] * 3)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_module_that_is_several_layers_runs_as_each(cut):
    whole = build(Repeated)
    ids = batch(Repeated)
    stages = Emulated(whole, ranges(cut), blocks=("encoder", "decoder"))
    found = stages.forward(*ids, training=True)
    torch.testing.assert_close(found, whole(*ids), **EXACT)


class UsedBehind(EncoderDecoder):
    """The memory is used after the decoder but not passed to its blocks."""

    def forward(self, source, target):
        memory = self.encode(self.source(source))
        y = self.target(target)
        for layer in self.decoder:
            y = layer(y)
        return self.head(y + memory.mean())


@pytest.mark.parametrize(
    ("model", "known", "words"),
    [
        (
            EmbeddedFirst,
            {"before": ("target",)},
            r"block 'decoder.0' has an input \(argument 0\).*between=",
        ),
        (UsedBehind, {}, "between or after the repeated blocks"),
        (EncoderDecoder, {"blocks": ("decoder", "encoder")}, "'.*' was called before"),
        (
            Examined,
            {"blocks": ("decoder", "encoder")},
            "does not call all of 'decoder' before 'encoder'",
        ),
    ],
)
def test_unsupported_cut_is_refused(model, known, words):
    with pytest.raises((StageError, ValueError), match=words):
        Emulated(build(model), ranges((3, 5)), **known).forward(*batch(model), training=True)
