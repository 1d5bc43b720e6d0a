"""A run on two hosts, emulated by two network namespaces joined by a veth pair."""

import contextlib
import os
import shutil
import subprocess

import pytest
import torch

from tests.conformance.launched import results, started, trained_alone

pytestmark = pytest.mark.thorough

ADDRESSES = ("10.213.9.1", "10.213.9.2")
LAYOUT = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}


def ip(command, *, check=True):
    subprocess.run(["ip", *command.split()], check=check, capture_output=True, timeout=30)


@pytest.fixture
def hosts():
    """Yield the names of two namespaces that are connected by one link, like two machines."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"ptdp-{os.getpid()}-{host}" for host in range(2)]
    try:
        try:
            for name in names:
                ip(f"netns add {name}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode()}")
        ip(f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}")
        for name, address in zip(names, ADDRESSES, strict=True):
            ip(f"-netns {name} address add {address}/24 dev eth0")
            ip(f"-netns {name} link set eth0 up")
            ip(f"-netns {name} link set lo up")
        yield names
    finally:
        for name in names:
            ip(f"netns delete {name}", check=False)


def deep_net():
    """Build the deep model of ``script.py``."""
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
        for _ in range(4)
    ]
    return torch.nn.Sequential(*blocks)


def test_tensor_parallel_within_and_pipeline_across_hosts(hosts, tmp_path):
    """torchrun's agents are left out: each rank has the variables that they would set."""
    settings = {"layout": LAYOUT, "num_nodes": 2, "deep": True}
    folders = [tmp_path / f"host{host}" for host in range(2)]
    common = {
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "two hosts",
        "GROUP_WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "4",
    }
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(4):
            host, local = divmod(rank, 2)
            folders[host].mkdir(exist_ok=True)
            own = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(host)}
            inside = settings | {"network": hosts[host]}
            script = started(folders[host], inside, **common, **own)
            ranks.append(stack.enter_context(script))
        codes = [rank.finish() for rank in ranks]
        assert codes == [0] * 4, "\n".join(rank.output for rank in ranks)
    here, there = (results(folder) for folder in folders)
    assert [rank["rank"] for rank in here + there] == [0, 1, 2, 3]
    assert here[0]["weights"].keys() == here[1]["weights"].keys(), (
        "the ranks of a host hold different stages"
    )
    assert not here[0]["weights"].keys() & there[0]["weights"].keys(), (
        "both hosts hold the same stage"
    )
    expected = trained_alone(deep_net)
    for name, value in here[0]["whole"].items():
        torch.testing.assert_close(torch.tensor(value), expected[name], rtol=1e-5, atol=1e-6)
    assert here[0]["whole"].keys() == expected.keys()
