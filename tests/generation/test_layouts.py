"""Text generation in every layout.

The text is the same as in one process. Generation does not change the training that follows.
"""

from functools import cache

import pytest
import torch

from lightning_ptdp.generation.scoring import score
from tests.generation.sampling_run import ROWS, Own, Writing, fit, refusal
from tests.huggingface.runs import LAYOUTS
from tests.parity import assert_weights_near

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def written(pool):
    """Return a function that trains and returns the results by rank, cached by its arguments."""

    @cache
    def run(model, layout, **options):
        world_size, degrees = {
            **LAYOUTS,
            "c2": (2, {"context_parallel_size": 2}),
            "d2": (2, {}),
            "e2": (2, {"expert_parallel_size": 2}),
            None: (1, {}),
        }[layout]
        writing = Writing(model=model, layout=degrees, world_size=world_size, **options)
        return pool.run(fit, world_size=world_size, args=(writing,))

    return run


CASES = [
    ("llama", "p2v2"),
    ("llama", "t2p2"),
    ("llama", "t2sp"),
    ("gemma3", "p2"),
    ("gpt", "t2p2"),
    ("gpt", "t2sp"),
    ("gpt", "c2"),
    ("gpt", "d2"),
    ("rope", "p2v2"),
    ("own", "p2"),
    ("mixtral", "e2"),
]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_text_equals_single_process(written, model, layout):
    found = written(model, layout)
    assert all(rank["written"] == found[0]["written"] for rank in found)
    assert found[0]["written"] == written(model, None)[0]["written"]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_scores_equal_single_process(written, model, layout):
    found = [rank["scores"] for rank in written(model, layout)]
    alone = written(model, None)[0]["scores"]
    assert len(alone) == 2 * len(ROWS)
    for ours, theirs in zip(found[0], alone, strict=True):
        assert ours == (pytest.approx(theirs[0], abs=1e-4), theirs[1])
    assert all(rank == found[0] for rank in found), "the replicas' ranks differ"


@pytest.mark.parametrize(
    ("model", "layout", "reason"),
    [
        ("gpt", {"shard": "parameters"}, "with shard='parameters' the replicas"),
        ("mixtral", {"expert_parallel_size": 2}, "with expert_parallel_size=2 the replicas"),
        ("gpt", {"tensor_parallel_size": 2}, "the ranks of a replica"),
    ],
)
def test_different_prompts_are_refused(pool, model, layout, reason):
    writing = Writing(model=model, layout=layout, world_size=2, differs=True)
    for error in pool.run(refusal, world_size=2, args=(writing,)):
        assert f"different prompts or options, but {reason} run every forward together" in error


def test_scores_equal_log_softmax():
    torch.manual_seed(0)
    model = Own().eval()
    expected = []
    for tokens, scored in ROWS:
        logs = model(torch.tensor([tokens[:-1]]))[0].log_softmax(-1)[-scored:]
        targets = torch.tensor(tokens[-scored:])
        hit = bool((logs.argmax(-1) == targets).all())
        value = float(logs[range(scored), targets].sum())
        expected.append((pytest.approx(value, abs=1e-5), hit))
    assert score(model, ROWS, batch_size=3) == expected
    ids = model(torch.tensor([[5, 6]]))[0, -1].argmax().item()
    assert score(model, [([5, 6, ids], 1)])[0][1], "the most likely token is not found"
    assert score(model, []) == []


@pytest.mark.parametrize(("model", "layout"), [("gpt", "t2p2"), ("llama", "p2v2"), ("gpt", None)])
def test_generation_does_not_change_training(written, model, layout):
    writes, silent = (
        written(model, layout, random=True, **options)[0] for options in ({}, {"samplings": None})
    )
    assert len(writes["written"]) == 2 * 2
    assert not silent["written"]
    assert_weights_near(writes["final"], silent["final"], tolerance=0)
