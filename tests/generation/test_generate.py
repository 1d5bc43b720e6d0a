"""Text generation in one process, compared with transformers and without a cache."""

import pytest
import torch
from torch import nn

from lightning_ptdp import Sampling, generate
from lightning_ptdp.models import Bert, BertConfig
from tests.generation.sampling_run import GREEDY, PROMPTS, SAMPLED, gpt
from tests.huggingface.runs import make_model


class Counting(nn.Module):
    """A model with logits 3, 2 and 1 for tokens n + 1, n + 2 and n + 3 after n; 0 for others."""

    def __init__(self):
        super().__init__()
        self.longest = 0

    def forward(self, ids):
        assert not self.training
        self.longest = max(self.longest, ids.size(1))
        logits = torch.zeros(*ids.shape, 10)
        for step, value in ((1, 3.0), (2, 2.0), (3, 1.0)):
            logits.scatter_(-1, ((ids + step) % 10)[..., None], value)
        return logits


class Uncached(nn.Module):
    """Wraps a model so that its type is unknown and it is used without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.config = model.config
        self.call = lambda ids: model.eval()(ids)

    def forward(self, ids):
        return self.call(ids)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "opt"])
def test_greedy_generation_equals_transformers(name):
    torch.manual_seed(1)
    model, theirs = make_model(name, sliding_window=4) if name == "gemma3" else make_model(name), []
    for prompt in PROMPTS:
        options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
        theirs.append(
            model.eval().generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        )
    assert generate(model, PROMPTS, GREEDY) == theirs


@pytest.mark.parametrize(
    "options", [{}, {"position": "rope", "num_kv_heads": 2}], ids=["learned", "rope"]
)
def test_cache_does_not_change_generated_tokens(options):
    torch.manual_seed(1)
    model = gpt(dropout=0.5, **options)
    for sampling in (
        Sampling(temperature=0.0, max_new_tokens=12),
        Sampling(temperature=2.0, top_k=0, max_new_tokens=12),
    ):
        written = generate(model.train(), PROMPTS, sampling)
        assert model.training
        assert written == generate(Uncached(model), PROMPTS, sampling)
    assert len({token for row in written for token in row}) > 10, (
        "the text has too few different tokens"
    )


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_cache_computes_every_token_once(name):
    seen = []
    model = gpt() if name == "gpt" else make_model(name)
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    embedding.register_forward_hook(lambda module, args, output: seen.append(args[0].size(1)))
    generate(model, [[1, 2, 3]], GREEDY)
    assert seen == [3, 1, 1, 1, 1, 1]


def test_rows_are_independent_and_stop_after_end_token():
    model = gpt()
    free = generate(model, PROMPTS, SAMPLED)
    assert generate(model, PROMPTS[:1], SAMPLED) == free[:1]
    ends = free[1][2]
    ended = generate(model, PROMPTS, SAMPLED, eos_ids=[ends])
    assert ended == [row[: row.index(ends) + 1] if ends in row else row for row in free]
    model = Counting()
    assert generate(model, [[3], [4]], Sampling(temperature=0.0), eos_ids=[6]) == [
        [4, 5, 6],
        [5, 6],
    ]


def test_seed_determines_text_and_global_rng_is_unchanged():
    model, before = gpt(), torch.get_rng_state()
    draws = [
        generate(model, PROMPTS, Sampling(max_new_tokens=20, temperature=1.5, seed=seed))
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_temperature_top_k_and_top_p():
    def drawn(**options):
        return [
            row[0]
            for row in generate(Counting(), [[0]] * 2000, Sampling(max_new_tokens=1, **options))
        ]

    assert set(drawn(top_k=2)) == {1, 2}
    assert len(set(drawn(temperature=2.0, top_k=99))) == 10
    for temperature in (0.5, 1.0, 2.0):
        share = drawn(temperature=temperature, top_k=2).count(1) / 2000
        assert share == pytest.approx(1 / (1 + torch.e ** (-1 / temperature)), abs=0.04)
    # Weights are e^3, e^2, e, 1 … of 37.2: the first two have 74%, the first three 81%.
    assert set(drawn(temperature=1.0, top_k=0, top_p=0.7)) == {1, 2}
    assert set(drawn(temperature=1.0, top_k=0, top_p=0.78)) == {1, 2, 3}


def test_context_is_truncated_and_zero_new_tokens_are_allowed():
    model = Counting()
    model.config = type("Config", (), {"sequence_length": 8})
    assert generate(model, [[3]], Sampling(temperature=0.0, max_new_tokens=12)) == [
        [n % 10 for n in range(4, 16)]
    ]
    assert model.longest == 8
    assert generate(model, [[1], [2]], Sampling(max_new_tokens=0)) == [[], []]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: generate(Counting(), [[1], []]), "a prompt has no token"),
        (lambda: Sampling(max_new_tokens=-1), "max_new_tokens=-1"),
        (lambda: Sampling(temperature=-0.5), "temperature=-0.5"),
        (lambda: Sampling(top_p=0.0), "top_p=0.0"),
        (
            lambda: generate(nn.ModuleDict({"a": gpt(), "b": gpt()}), [[1]]),
            r"several models, 'a' and 'b'.*module\.a",
        ),
        (
            lambda: generate(make_model("t5"), [[1]]),
            "T5ForConditionalGeneration cannot generate text",
        ),
        (
            lambda: generate(
                Bert(BertConfig(vocabulary_size=61, num_layers=1, hidden_size=8, num_heads=2)),
                [[1]],
            ),
            "a Bert cannot generate",
        ),
    ],
    ids=["empty", "tokens", "temperature", "top_p", "several", "t5", "bert"],
)
def test_invalid_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
