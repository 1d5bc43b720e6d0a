"""``Trainer(deterministic=True)`` on a GPU: every operation of ours has a deterministic kernel."""

import pytest
import torch

from lightning_ptdp.engine.rank_agreement import batch_sums
from lightning_ptdp.generation.generation_options import Sampling
from lightning_ptdp.generation.write import choose
from tests.fake_cuda import fake_cuda


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.cumsum(0),
        lambda x: x.int().cumsum(0, dtype=torch.float64),
        lambda x: x.histc(4),
        lambda x: x.median(0),
        lambda x: x.int().bincount(weights=x),
    ],
)
@pytest.mark.usefixtures("deterministic")
def test_fake_gpu_refuses_nondeterministic_operations(operation):
    operation(torch.ones(4))
    with fake_cuda(0), pytest.raises(RuntimeError, match="deterministic implementation"):
        operation(torch.ones(4, device="cuda"))


@pytest.mark.usefixtures("deterministic")
def test_batch_sums_and_sampling_run_in_deterministic_mode():
    with fake_cuda(0):
        x = torch.ones(4, device="cuda")
        assert x.int().cumsum(0).tolist() == [1, 2, 3, 4]
        assert x.median().item() == 1
        batch_sums({"x": x}, replica=0, replicas=1, device=x.device)
        logits = torch.zeros(1, 4, device="cuda")
        draws = torch.tensor([0.6], dtype=torch.float64, device="cuda")
        assert choose(logits, draws, Sampling(max_new_tokens=1, top_p=0.9)).shape == (1,)
