"""Parameter and FLOP counts match the paper's tables, its formulas and counted operations."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_ptdp.models import GPT, GPTConfig, flops_per_sample, num_parameters
from tests.metrics.paper import ptdp_parameters, ptdp_step_flops

pytestmark = pytest.mark.thorough

# arXiv 2104.04473, table 1: billions of parameters, heads, hidden size, layers.
TABLE_1 = [
    (1.7, 24, 2304, 24),
    (3.6, 32, 3072, 30),
    (7.5, 32, 4096, 36),
    (18.4, 48, 6144, 40),
    (39.1, 64, 8192, 48),
    (76.1, 80, 10240, 60),
    (145.6, 96, 12288, 80),
    (310.1, 128, 16384, 96),
    (529.6, 128, 20480, 105),
    (1008.0, 160, 25600, 128),
]
# Table 2, 300 B tokens: heads, hidden size, layers, batch, GPUs, TFLOP/s per GPU, days; for ZeRO-3
# and PTD-P.
TABLE_2 = [
    (96, 12288, 96, 1536, 384, 144, 90),
    (96, 12288, 96, 1536, 384, 153, 84),
    (96, 12288, 96, 1536, 768, 149, 43),
    (96, 12288, 96, 1536, 1536, 141, 23),
    (128, 20480, 105, 2560, 640, 138, 169),
    (128, 20480, 105, 2240, 560, 171, 156),
    (128, 20480, 105, 2240, 1120, 167, 80),
    (128, 20480, 105, 2240, 2240, 159, 42),
]


def paper_model(heads, hidden, layers):
    return GPTConfig.gpt2(
        vocabulary_size=51200,
        sequence_length=2048,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
    )


@pytest.mark.parametrize(("billions", "heads", "hidden", "layers"), TABLE_1)
def test_parameter_count_matches_table_1(billions, heads, hidden, layers):
    formula = ptdp_parameters(
        num_layers=layers, hidden_size=hidden, vocabulary_size=51200, sequence_length=2048
    )
    assert formula / 1e9 == pytest.approx(billions, rel=0.01, abs=0.05)
    # The formula omits the final norm (2h).
    assert num_parameters(paper_model(heads, hidden, layers)) == pytest.approx(
        formula + 2 * hidden, abs=1
    )


@pytest.mark.parametrize(("heads", "hidden", "layers", "batch", "gpus", "tflops", "days"), TABLE_2)
def test_training_days_match_table_2(heads, hidden, layers, batch, gpus, tflops, days):
    step = ptdp_step_flops(
        batch_size=batch,
        sequence_length=2048,
        num_layers=layers,
        hidden_size=hidden,
        vocabulary_size=51200,
    )
    steps = 300e9 / (batch * 2048)
    assert step * steps / (gpus * tflops * 1e12) / 86400 == pytest.approx(days, rel=0.025)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(("billions", "heads", "hidden", "layers"), TABLE_1[:3])
def test_flops_of_gpt2_match_formula(billions, heads, hidden, layers, recompute):
    sizes = {
        "sequence_length": 2048,
        "num_layers": layers,
        "hidden_size": hidden,
        "vocabulary_size": 51200,
    }
    formula = ptdp_step_flops(batch_size=1, recompute=recompute, **sizes)
    assert flops_per_sample(
        paper_model(heads, hidden, layers), recompute=recompute
    ) == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig.gpt2(
            vocabulary_size=64, sequence_length=32, num_layers=2, hidden_size=32, num_heads=4
        ),
        GPTConfig.llama(
            vocabulary_size=64,
            sequence_length=32,
            num_layers=2,
            hidden_size=32,
            num_heads=4,
            num_kv_heads=1,
        ),
    ],
    ids=["gpt2", "llama gqa"],
)
def test_flops_match_counted_matrix_products(config):
    model = GPT(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(3, 32, dtype=torch.int64)).sum().backward()
    by_kind = {str(kind): count for kind, count in counter.get_flop_counts()["Global"].items()}
    attention = sum(count for kind, count in by_kind.items() if "attention" in kind)
    # The backward pass of fused attention recomputes the scores: 5 products for 2 in the forward
    # pass. Without recomputation it needs 4.
    products = sum(by_kind.values()) - attention + 3 * 4 * 3 * 32 * 32 * 32 * 2
    assert products == 3 * flops_per_sample(config)
