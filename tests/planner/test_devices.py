"""Device and software presets."""

import dataclasses

import pytest

from lightning_ptdp.models import GPTConfig
from lightning_ptdp.planner import (
    DEVICES,
    SOFTWARE,
    find_device,
    find_software,
    known_device,
    known_peak_flops,
)
from lightning_ptdp.planner.sublayer_cost import attention_time
from tests.planner.jobs import choice, small_job

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989e12),
        ("NVIDIA A100-SXM4-80GB", "32-true", 19.5e12),
        ("NVIDIA H200", "16-true", 989e12),
        ("cpu", "32-true", None),
        ("NVIDIA T4", "32-true", None),
    ],
)
def test_peak_flops_of_known_devices(device, precision, peak):
    assert known_peak_flops(device, precision) == peak


def test_device_lookup_and_validation():
    assert find_device("A100") is DEVICES["a100-80gb"]
    assert find_device("h200").usable_bytes == 138 * 2**30
    with pytest.raises(ValueError, match=r"device='h1000' is unknown. Did you mean 'h"):
        find_device("h1000")
    for changes, words in (
        ({"product_share": 1.2}, r"product_share=1\.2 must be a share"),
        ({"flops_16": 0}, "flops_16=0 must be greater"),
        ({"reserved_bytes": 1e15}, "reserved_bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(find_device("cpu"), **changes)
    with pytest.raises(ValueError, match="node_size=0"):
        dataclasses.replace(find_device("h100").cluster, node_size=0)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_reported_device_name_selects_preset(name, preset):
    assert known_device(name) is DEVICES[preset]


@pytest.mark.parametrize(
    ("name", "preset", "gib"),
    [("NVIDIA A100-PCIE-40GB", "a100-pcie", 40), ("Tesla V100-SXM2-16GB", "v100", 16)],
)
def test_reported_memory_limits_preset(name, preset, gib):
    found = known_device(name)
    assert 0.95 * gib < found.memory_bytes / 2**30 < gib
    assert dataclasses.replace(found, memory_bytes=1e11) == dataclasses.replace(
        DEVICES[preset], memory_bytes=1e11
    )


@pytest.mark.parametrize("name", ["v100", "a100", "h100", "b200"])
def test_attention_runs_at_most_at_75_percent_of_peak(name):
    """FlashAttention-2 achieves up to 73 % of an A100's peak, FlashAttention-3 75 % of an H100's
    (arXiv 2407.08608, abstract). megatron-2024 has a tuned kernel only for devices with a
    published one."""
    model, how = (
        GPTConfig.llama(sequence_length=4096, num_layers=1, hidden_size=4096, num_heads=32),
        choice(b=1, m=1),
    )
    device, shares = find_device(name), {}
    for software in ("ours", "megatron-2024"):
        job = dataclasses.replace(small_job(model, device=name), software=SOFTWARE[software])
        attention = job.shape.layers[0].attentions[0]
        seconds = attention_time(job, how, attention).forward
        shares[software] = attention.flops / 2 / seconds / device.flops_16 / device.sustained
    assert shares["ours"] <= shares["megatron-2024"] <= 0.75
    assert (
        (shares["megatron-2024"] > shares["ours"])
        == (device.tuned_attention_share is not None)
        == (name in ("h100", "b200"))
    )


def test_software_lookup():
    assert find_software("ours-compiled").attention == "fused"
    with pytest.raises(ValueError, match=r"software='our' is unknown. Did you mean 'ours'"):
        find_software("our")
