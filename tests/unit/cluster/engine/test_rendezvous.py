"""The rendezvous of ranks: private files, stores on one address, and the choice of a network interface."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from cluster.engine.rendezvous import file_rendezvous, interface_of, open_store, use_interface

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses the names of Linux's interfaces")

CHOICES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """The environment without a choice of interface."""
    clean = {name: value for name, value in os.environ.items() if name not in CHOICES}
    with mock.patch.dict(os.environ, clean, clear=True):
        yield os.environ  # type: ignore[misc]


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # reserved for documentation


def test_ranks_of_one_node_use_loopback(environment: dict[str, str], tmp_path: Path) -> None:
    environment |= dict.fromkeys(CHOICES, "eth7")
    use_interface(file_rendezvous(tmp_path / "ranks"), "192.0.2.1")
    assert [environment[name] for name in CHOICES] == ["lo", "=lo"]


def test_ranks_of_several_nodes_use_the_interface_of_the_nodes_address(environment: dict[str, str]) -> None:
    use_interface("tcp://127.0.0.1:1", "127.0.0.1")
    assert [environment[name] for name in CHOICES] == ["lo", "=lo"]


def test_the_operators_choice_takes_precedence_between_nodes(environment: dict[str, str]) -> None:
    environment |= dict.fromkeys(CHOICES, "ib0")
    use_interface("tcp://127.0.0.1:1", "127.0.0.1")
    assert [environment[name] for name in CHOICES] == ["ib0", "ib0"]


def test_the_store_listens_on_the_nodes_address_only() -> None:
    from torch.distributed import TCPStore

    store, init_method = open_store("127.0.0.1")
    port = int(init_method.removeprefix("tcp://127.0.0.1:"))
    TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=2)


def test_rank_0_joins_the_store_of_its_own_process() -> None:
    """torch.distributed opens the store again in rank 0, and must get the existing one."""
    from torch.distributed import TCPStore

    store, init_method = open_store("127.0.0.1")
    port = int(init_method.rpartition(":")[2])
    again = TCPStore("127.0.0.1", port, 1, is_master=True, multi_tenant=True)
    again.set("key", "value")
    assert store.get("key") == b"value"
