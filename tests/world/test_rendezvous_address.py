"""Reserved ports for the rendezvous of ranks."""

import socket

import pytest

from lightning_ptdp.world.rendezvous_address import LOOPBACK, reserved_port


def test_reserved_port_is_bound_only_with_reuse_address():
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((LOOPBACK, port))
        with socket.create_server((LOOPBACK, port)) as server:
            socket.create_connection((LOOPBACK, port)).close()
            assert server.getsockname()[1] == port
