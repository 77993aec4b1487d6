"""Engines on two nodes, one of them split over both: the same text, and what a frozen rank, a lost node or a cut link
costs."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from specray.cli.local_server import free_port
from specray.llm import LLM
from specray.sampling_params import SamplingParams
from tests.support.networks import Network
from tests.support.processes import own_processes
from tests.support.two_nodes import STORE_BYTES, TwoNodes, environment

TORN_DOWN_S = 5.0  # a broken group's ranks end in so long,
SLACK_S = 5.0  # on a machine that has time for them
ORPHANS_END_S = 6.0  # ranks whom nobody reaches end themselves
SMALL = {"max_total_tokens": 4096, "num_threads": 1, "dtype": "float32", "device": "cpu"}
LONG = {"max_tokens": 250, "temperature": 0.8, "ignore_eos": True}
PROMPTS = [f"Story number {number}:" for number in range(9)]

# The head has room for one engine and a half, the second node for as many, and only the head for the ingress. So each
# has an engine of its own, the third is split, and its router is on the head: that of a second one would not fit there.
SPLIT = {
    "tp_size": 2,
    "placement": {"across_nodes": True, "rank_resources": {"seat": 1}},
    "server": {"router_cpus": 1, "rank_cpus": 1, "ingress_cpus": 5},
}
HEAD = {"num_cpus": 32, "resources": {"seat": 3}}
SECOND = {"num_cpus": 4, "resources": {"seat": 3}}


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[str]:
    """What one rank without a cluster writes."""
    llm = LLM(model=str(tiny_model), **SMALL)
    params = [SamplingParams(seed=seed, **LONG) for seed in range(len(PROMPTS))]
    return [generation.choices[0].text for generation in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def nodes(tiny_model: Path) -> Iterator[TwoNodes]:
    """Three engines, the third on both nodes."""
    config = {"model": str(tiny_model), **SMALL, **SPLIT, "server": {**SPLIT["server"], "num_replicas": 3}}
    with TwoNodes(config, free_port(), head=HEAD, second=SECOND) as nodes:
        nodes.await_ready()
        yield nodes


class Streams:
    """A stream for each prompt; what they wrote is known at the end."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._begun = [threading.Event() for _ in range(count)]
        self._pool = ThreadPoolExecutor(count)
        self._texts = [self._pool.submit(self._write, number) for number in range(count)]
        for number, begun in enumerate(self._begun):
            assert begun.wait(60), f"stream {number} has not begun"

    def texts(self) -> list[str]:
        texts = [text.result() for text in self._texts]
        self._pool.shutdown()
        return texts

    def _write(self, number: int) -> str:
        """The text if its end was announced, as it is when nothing is missing; the error otherwise."""
        body = {"prompt": PROMPTS[number], "seed": number, "stream": True, **LONG}
        text = ""
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=120.0) as reply:
            for event in (line.removeprefix("data: ") for line in reply.iter_lines() if line):
                if event == "[DONE]":
                    return text
                chunk = json.loads(event)
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["text"]
                self._begun[number].set()
        raise AssertionError(f"the stream ended in silence after {text!r}")


def writing_replicas(url: str) -> set[str]:
    """Routers that have written tokens."""
    metrics = httpx.get(f"{url}/metrics").text
    counts = re.findall(r'^specray_generation_tokens_total\{.*?replica="(\w+)".*?\} (\S+)$', metrics, re.MULTILINE)
    return {replica for replica, count in counts if float(count)}


def lone_follower() -> int:
    """Rank 1 of the split engine: its heartbeat file is in a folder of its node, which has no other rank's."""
    folders = defaultdict[str, dict[int, int]](dict)
    for pid in own_processes("ray::TargetActor"):
        for folder, rank in re.findall(r"(\S+/specray-\w+)/heartbeat-(\d+)", Path(f"/proc/{pid}/maps").read_text()):
            folders[folder][int(rank)] = pid
    return next(ranks[1] for ranks in folders.values() if list(ranks) == [1])


def seconds_until_gone(pid: int, limit: float) -> float:
    start = time.monotonic()
    while Path(f"/proc/{pid}").exists() and not is_zombie(pid):
        assert time.monotonic() - start < limit, f"process {pid} still lives after {limit:g} s"
        time.sleep(0.1)
    return time.monotonic() - start


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def network() -> Iterator[Network]:
    if not Network.can_be_made():
        pytest.skip("needs root, iproute2 and the kernel's network namespaces")
    with Network() as network:
        yield network


@contextmanager
def node_at_the_far_end(network: Network, address: str) -> Iterator[None]:
    """A second node, on the other side of the wire."""
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "start", f"--address={address}", f"--node-ip-address={network.far_address}", "--block"]
    command += ["--num-cpus=1", '--resources={"seat": 1}', f"--object-store-memory={STORE_BYTES}"]
    with network.run(command, env=environment(), stdout=subprocess.DEVNULL):
        try:
            yield
        finally:
            network.end_processes()


def test_an_engine_on_two_nodes_writes_the_same_text(nodes: TwoNodes, expected: list[str]) -> None:
    assert Streams(nodes.url, len(PROMPTS)).texts() == expected
    assert len(writing_replicas(nodes.url)) == 3


def test_a_frozen_rank_on_another_node_is_ended_and_its_streams_go_on(nodes: TwoNodes, expected: list[str]) -> None:
    frozen = lone_follower()
    streams = Streams(nodes.url, len(PROMPTS))
    os.kill(frozen, signal.SIGSTOP)
    seconds_until_gone(frozen, TORN_DOWN_S + SLACK_S)
    assert streams.texts() == expected


def test_streams_of_a_lost_node_go_on_elsewhere(nodes: TwoNodes, expected: list[str]) -> None:
    streams = Streams(nodes.url, len(PROMPTS))
    nodes.kill_second_node()
    assert streams.texts() == expected


@pytest.mark.slow
def test_streams_outlive_a_cut_link_and_nobody_stays_behind_it(
    tiny_model: Path, expected: list[str], network: Network
) -> None:
    """Two engines on the head, but for a rank of the second one."""
    config = {"model": str(tiny_model), **SMALL, **SPLIT, "server": {**SPLIT["server"], "num_replicas": 2}}
    head = HEAD | {"node_ip_address": network.near_address}
    with (
        TwoNodes(config, free_port(), head=head, second=None) as nodes,
        node_at_the_far_end(network, nodes.await_address()),
    ):
        nodes.await_ready()
        cut_off = [lone_follower(), *own_processes("ray::WatchdogActor")]
        streams = Streams(nodes.url, len(PROMPTS))
        network.cut()
        for pid in cut_off:
            seconds_until_gone(pid, ORPHANS_END_S + SLACK_S)
        assert streams.texts() == expected
