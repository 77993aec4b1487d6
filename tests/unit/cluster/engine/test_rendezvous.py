"""Ranks meet where nobody else listens, over the interface that their node has its address on."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from cluster.engine.rendezvous import interface_of, meeting_file, open_store, use_interface

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are named as Linux does")

CHOICES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """The process's environment without a choice of interface."""
    clean = {name: value for name, value in os.environ.items() if name not in CHOICES}
    with mock.patch.dict(os.environ, clean, clear=True):
        yield os.environ  # type: ignore[misc]


def test_an_address_has_its_interface() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # for documentation only: nobody has it


def test_ranks_of_one_node_keep_to_loopback(environment: dict[str, str], tmp_path: Path) -> None:
    environment["GLOO_SOCKET_IFNAME"] = "eth7"
    use_interface(meeting_file(tmp_path), "192.0.2.1")
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in environment


def test_ranks_of_several_nodes_use_the_nodes_interface(environment: dict[str, str]) -> None:
    use_interface("tcp://127.0.0.1:1", "127.0.0.1")
    assert [environment[name] for name in CHOICES] == ["lo", "=lo"]


def test_between_nodes_the_operators_choice_goes_first(environment: dict[str, str]) -> None:
    environment |= dict.fromkeys(CHOICES, "ib0")
    use_interface("tcp://127.0.0.1:1", "127.0.0.1")
    assert [environment[name] for name in CHOICES] == ["ib0", "ib0"]


def test_the_store_is_open_on_the_nodes_address_only() -> None:
    from torch.distributed import TCPStore

    store, meeting = open_store("127.0.0.1")
    port = int(meeting.removeprefix("tcp://127.0.0.1:"))
    TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set("said", "there")
    assert store.get("said") == b"there"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=2)


def test_ranks_in_the_stores_process_and_elsewhere_meet_there() -> None:
    """torch.distributed opens the store anew in rank 0: in its process that has to be the one that is there."""
    from torch.distributed import TCPStore

    store, meeting = open_store("127.0.0.1")
    port = int(meeting.rpartition(":")[2])
    again = TCPStore("127.0.0.1", port, 1, is_master=True, multi_tenant=True)
    again.set("said", "there")
    assert store.get("said") == b"there"
