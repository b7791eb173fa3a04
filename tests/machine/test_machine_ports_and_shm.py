"""Ports and their owners, and shared memory and its mappers, on the real machine."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterator

import pytest

from forebay.machine.local import LocalMachine
from forebay.machine.ports import PortState, listeners, port_report
from forebay.machine.shm import shm_files

machine = LocalMachine()


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        yield server


def test_a_listener_is_named_with_its_process(bound: socket.socket) -> None:
    bound.listen()
    port = bound.getsockname()[1]
    report = port_report(machine, port)
    assert report.state is PortState.LISTENING
    assert report.pids == (os.getpid(),)
    assert report.listeners[0].address == "127.0.0.1"


def test_a_listener_on_ipv6_is_found_too() -> None:
    with socket.socket(socket.AF_INET6) as server:
        try:
            server.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
        server.listen()
        found = listeners(machine, server.getsockname()[1])
        assert [(item.address, item.pids) for item in found] == [("::1", (os.getpid(),))]


def test_bound_without_listening_is_neither_free_nor_listening(bound: socket.socket) -> None:
    """A vLLM that is loading: /proc/net/tcp shows nothing, and yet the port is taken."""
    report = port_report(machine, bound.getsockname()[1])
    assert (report.state, report.listeners) == (PortState.BOUND, ())


def test_a_port_nobody_has_is_free(bound: socket.socket) -> None:
    port = bound.getsockname()[1]
    bound.close()
    assert port_report(machine, port).state is PortState.FREE


def test_an_address_that_is_not_ours_is_said_so() -> None:
    assert port_report(machine, 1, host="192.0.2.1").state is PortState.NO_SUCH_ADDRESS


def test_a_shm_file_lists_its_mappers_and_then_nobody() -> None:
    name = f"forebay-test-{os.getpid()}"
    path = f"/dev/shm/{name}"
    try:
        with open(path, "wb+") as file:
            file.truncate(1 << 20)
            mapping = mmap.mmap(file.fileno(), 1 << 20)
        mapping[:4096] = b"x" * 4096
        mine = next(item for item in shm_files(machine) if item.name == name)
        assert (mine.pids, mine.size_bytes) == ((os.getpid(),), 1 << 20)
        assert 0 < mine.allocated_bytes < 1 << 20  # sparse: only what was touched
        mapping.close()
        mine = next(item for item in shm_files(machine) if item.name == name)
        assert mine.pids == ()
    finally:
        machine.remove(path)
