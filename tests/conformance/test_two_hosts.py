"""A run on two hosts, emulated by two network namespaces joined by a veth pair."""

import contextlib
import os
import shutil
import subprocess

import pytest
import torch

from tests.conformance.launched import results, started_afresh, trained_alone

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
    settings = {"layout": LAYOUT, "num_nodes": 2, "deep": True}
    folders = [tmp_path / f"host{host}" for host in range(2)]
    with contextlib.ExitStack() as stack:
        nodes = []
        for host, (name, folder) in enumerate(zip(hosts, folders, strict=True)):
            folder.mkdir()
            rendezvous = [
                "--nnodes=2",
                f"--node-rank={host}",
                f"--master-addr={ADDRESSES[0]}",
                "--master-port=29500",
            ]
            torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", *rendezvous]
            inside = ["ip", "netns", "exec", name]
            nodes.append(
                stack.enter_context(
                    started_afresh(
                        folder, settings, torchrun, inside=inside, GLOO_SOCKET_IFNAME="eth0"
                    )
                )
            )
        codes = [node.finish() for node in nodes]
        assert codes == [0, 0], "\n".join(node.output for node in nodes)
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
