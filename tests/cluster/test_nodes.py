"""Engines on three nodes, one of them across two, with drafters on all ranks: the text of plain decoding.

Also with a frozen rank, a cut link or a lost node. Half of the requests have an EAGLE-3 head, the others MTP layers.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from specray.cli.local_server import free_port
from specray.llm import LLM
from specray.sampling_params import SamplingParams
from tests.support.heads import write_random_head
from tests.support.mtp import write_mimo_layers
from tests.support.networks import Network
from tests.support.nodes import JOIN_ATTEMPTS, STORE_BYTES, Json, Nodes, environment
from tests.support.processes import own_processes, wait_until

GROUP_END_S = 5.0  # within which ranks of a broken group end
SLACK_S = 5.0  # for a busy machine
REPLACEMENT_S = 90.0  # for an engine that starts again
UNREACHABLE_END_S = 6.0  # within which unreachable ranks exit
SMALL = {"max_total_tokens": 4096, "num_threads": 1, "dtype": "float32", "device": "cpu"}
LONG = {"max_tokens": 200, "temperature": 0.8, "ignore_eos": True}
PROMPTS = [f"Story number {number}:" for number in range(6)]
DRAFTERS = ("head", "layers")
FIRST_OF_LAST = 130  # of the tokens that a stream gets after a fault

# Three engines of two ranks, each of which takes a seat, and only the head can hold the ingress. So head and second
# node have an engine each, and the third is across the head, with its router, and the far node. A draft actor is beside
# each rank.
SPLIT = {
    "tp_size": 2,
    "placement": {"across_nodes": True, "rank_resources": {"seat": 1}},
    "draft": {"cpus": 0.5},
    "server": {"num_replicas": 3, "router_cpus": 1, "rank_cpus": 0.5, "ingress_cpus": 5},
}
HEAD = {"num_cpus": 32, "resources": {"seat": 3}}
SECOND = {"num_cpus": 4, "resources": {"seat": 2}}
FAR = {"num_cpus": 1, "resources": {"seat": 1}}


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[str]:
    """The texts of one rank without a cluster and without drafts."""
    llm = LLM(model=str(tiny_model), **SMALL)
    params = [SamplingParams(seed=seed, **LONG) for seed in range(len(PROMPTS))]
    return [generation.choices[0].text for generation in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def network() -> Iterator[Network | None]:
    """A network that tests can cut; None where it cannot be made."""
    if not Network.can_be_made():
        yield None
        return
    with Network() as network:
        yield network


@pytest.fixture(scope="module")
def speculative(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Two drafters, both of which are split over the ranks."""
    folder = tmp_path_factory.mktemp("drafters")
    head = write_random_head(folder / "head", tiny_model, 3, draft_vocab_size=256)
    layers = write_mimo_layers(folder / "layers", tiny_model)
    shape = {"num_steps": 2, "eagle_topk": 2, "num_draft_tokens": 5}
    return {
        "budget": "static",  # auto would find that random drafters hardly pay, and draft in few steps
        "drafters": [
            {"name": "head", "algorithm": "EAGLE3", "draft_model_path": str(head), **shape},
            {"name": "layers", "algorithm": "MTP", "draft_model_path": str(layers), **shape},
        ],
    }


@pytest.fixture(scope="module")
def nodes(tiny_model: Path, speculative: dict[str, object], network: Network | None) -> Iterator[Nodes]:
    """Three nodes with three engines. The far node is behind the network's link, if there is one."""
    config = {"model": str(tiny_model), "speculative": speculative, **SMALL, **SPLIT}
    if network is None:
        with Nodes(config, free_port(), HEAD, [SECOND, FAR]) as nodes:
            nodes.await_ready()
            yield nodes
        return
    head = HEAD | {"node_ip_address": network.near_address}
    with Nodes(config, free_port(), head, [SECOND], num_joining=1) as nodes, far_node(network, nodes.address()):
        nodes.await_ready()
        yield nodes


@contextmanager
def far_node(network: Network, address: str) -> Iterator[None]:
    """The node behind the link, started again if its raylet hangs at the start, as in `tests.support.nodes`."""
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "start", f"--address={address}", f"--node-ip-address={network.far_address}", "--block"]
    command += [f"--num-cpus={FAR['num_cpus']}", f"--resources={json.dumps(FAR['resources'])}"]
    command += [f"--object-store-memory={STORE_BYTES}"]
    for _ in range(JOIN_ATTEMPTS):
        with network.run(command, env=environment(), stdout=subprocess.PIPE) as node:
            try:
                if any(b"Ray runtime started" in line for line in node.stdout or ()):
                    yield
                    return
            finally:
                network.end_processes()
    raise RuntimeError(f"the far node has not joined in {JOIN_ATTEMPTS} attempts")


class Streams:
    """A stream for each prompt. All have been drafted for once this is constructed; `texts` waits for their ends."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._usage: list[list[tuple[int, Json]]] = [[] for _ in range(count)]  # (tokens, drafts) after each chunk
        self._pool = ThreadPoolExecutor(count)
        self._texts = [self._pool.submit(self._write, number) for number in range(count)]
        wait_until(lambda: self._are_drafted() or any(text.done() for text in self._texts), 60)
        assert self._are_drafted(), f"no drafts: {[usage[-1:] for usage in self._usage]}"

    def texts(self) -> list[str]:
        texts = [text.result() for text in self._texts]
        self._pool.shutdown()
        return texts

    def interrupt(self, fault: Callable[[], object]) -> None:
        """Cause a fault while streams have most of their tokens before them; on a busy machine not all have."""
        self._failovers = num_failovers(self._url)
        fault()
        self._interrupted = [usage for usage in self._usage if usage[-1][0] < FIRST_OF_LAST]
        assert self._interrupted, "the fault came too late"

    def texts_after_fault(self) -> list[str]:
        """The texts. Some streams continue on other engines; all interrupted ones have drafts for their last tokens."""
        texts = self.texts()
        assert num_failovers(self._url) > self._failovers
        for usage in self._interrupted:
            earlier = max(drafts["draft_tokens"] for tokens, drafts in usage if tokens < FIRST_OF_LAST)
            drafts = usage[-1][1]
            assert drafts["draft_tokens"] > earlier, f"no drafts for the last tokens: {drafts}"
        return texts

    def _are_drafted(self) -> bool:
        return all(usage and usage[-1][1]["draft_tokens"] for usage in self._usage)

    def _write(self, number: int) -> str:
        """The complete text, or the error event."""
        drafter = {"speculative": {"drafter": DRAFTERS[number % len(DRAFTERS)]}}
        usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        body = {"prompt": PROMPTS[number], "seed": number, "stream": True, **LONG, **drafter, **usage}
        text = ""
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=120.0) as reply:
            for event in (line.removeprefix("data: ") for line in reply.iter_lines() if line):
                if event == "[DONE]":
                    return text
                chunk = json.loads(event)
                assert "error" not in chunk, chunk
                text += "".join(choice["text"] for choice in chunk["choices"])
                self._usage[number].append((chunk["usage"]["completion_tokens"], chunk["usage"]["speculative"]))
        raise AssertionError(f"the stream ended without an end event after {text!r}")


def num_failovers(url: str) -> int:
    """Requests that have continued on another engine."""
    count: int = httpx.get(f"{url}/server_info", timeout=30.0).json()["num_failovers"]
    return count


def replicas(url: str, metric: str = "generation_tokens_total", labels: str = "") -> dict[str, float]:
    """A counter of each running engine: by default, of the tokens that it has generated. `labels` is a pattern."""
    metrics = httpx.get(f"{url}/metrics").text
    line = rf'^specray_{metric}\{{(?=.*{labels}).*?replica="(\w+)".*?\}} (\S+)$'
    return {replica: float(count) for replica, count in re.findall(line, metrics, re.MULTILINE)}


def remote_rank_pid() -> int:
    """Rank 1 of the engine across nodes: its heartbeat file is alone in a folder of its node."""
    folders = defaultdict[str, dict[int, int]](dict)
    for pid in own_processes("ray::TargetActor"):
        for folder, rank in re.findall(r"(\S+/specray-\w+)/heartbeat-(\d+)", Path(f"/proc/{pid}/maps").read_text()):
            folders[folder][int(rank)] = pid
    return next(ranks[1] for ranks in folders.values() if list(ranks) == [1])


def seconds_until_gone(pid: int, limit: float) -> float:
    start = time.monotonic()
    while Path(f"/proc/{pid}").exists() and not is_zombie(pid):
        assert time.monotonic() - start < limit, f"process {pid} still runs after {limit:g} s"
        time.sleep(0.1)
    return time.monotonic() - start


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_engines_on_several_nodes_give_the_same_text(nodes: Nodes, expected: list[str]) -> None:
    assert Streams(nodes.url, len(PROMPTS)).texts() == expected
    assert len([count for count in replicas(nodes.url, "spec_decode_num_draft_tokens_total").values() if count]) == 3
    for name in DRAFTERS:
        assert sum(replicas(nodes.url, "drafter_draft_tokens_total", f'drafter="{name}"').values()) > 0


def test_a_frozen_rank_on_another_node_is_killed_and_its_streams_continue(nodes: Nodes, expected: list[str]) -> None:
    frozen = remote_rank_pid()
    streams = Streams(nodes.url, len(PROMPTS))
    streams.interrupt(lambda: os.kill(frozen, signal.SIGSTOP))
    seconds_until_gone(frozen, GROUP_END_S + SLACK_S)
    assert streams.texts_after_fault() == expected


@pytest.mark.slow
def test_streams_survive_a_cut_link_and_unreachable_ranks_exit(
    nodes: Nodes, expected: list[str], network: Network | None
) -> None:
    if network is None:
        pytest.skip("needs root, iproute2 and the kernel's network namespaces")
    wait_until(lambda: len(replicas(nodes.url)) == 3, REPLACEMENT_S)  # the frozen rank's engine starts again
    cut_off = [remote_rank_pid(), *own_processes("ray::WatchdogActor")]
    streams = Streams(nodes.url, len(PROMPTS))
    streams.interrupt(network.cut)
    for pid in cut_off:
        seconds_until_gone(pid, UNREACHABLE_END_S + SLACK_S)
    assert streams.texts_after_fault() == expected


def test_streams_of_a_lost_node_continue_elsewhere(nodes: Nodes, expected: list[str]) -> None:
    streams = Streams(nodes.url, len(PROMPTS))
    streams.interrupt(nodes.kill_second_node)
    assert streams.texts_after_fault() == expected
