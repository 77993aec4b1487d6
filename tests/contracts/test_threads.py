"""Every thread and background task of the cluster and the engine is known, with what its failure ends.

One that ends alone and in silence leaves an engine that nobody watches. A new one is added here with its test.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNIT = "tests/unit/cluster"
ROUTING = "specray/server/routing"
# (file, what starts it) -> the test that shows what its failure ends, or the reason why it cannot fail alone
THREADS = {
    ("specray/engine/async_engine.py", "Thread(self._run)"): (
        "tests/unit/engine/test_async_engine.py::test_any_error_of_the_step_loop_ends_all_requests"
    ),
    ("specray/engine/draft_budget/store.py", "Thread(self._write)"): (
        "tests/unit/engine/draft_budget/test_costs.py::test_a_folder_that_cannot_be_written_is_named_once"
    ),
    ("cluster/engine/supervisor.py", "Thread(self._run)"): (
        f"{UNIT}/engine/test_supervisor.py::test_an_error_in_the_supervision_ends_the_engine_with_its_reason"
    ),
    ("cluster/engine/router.py", "create_task(work)"): (
        f"{UNIT}/engine/test_router_failures.py::test_an_error_in_the_routers_own_work_ends_the_engine"
    ),
    ("cluster/engine/router.py", "Thread(self._executor.close)"): "the process exits half a second later anyway",
    ("cluster/engine/draft.py", "ThreadPoolExecutor"): "`start` raises its error",
    ("specray/engine/request_log.py", "Thread(self._write_all)"): (
        "tests/unit/engine/test_request_log.py::test_a_log_goes_on_once_its_folder_can_be_written_again"
    ),
    ("specray/heartbeat.py", "Thread(self._keep_beating)"): "without it the process counts as frozen",
    ("cluster/liveness/watchdog.py", "Thread(_watch_router)"): (
        f"{UNIT}/liveness/test_watchdog.py::test_a_router_that_cannot_be_watched_is_killed"
    ),
    ("cluster/liveness/watchdog.py", "Thread(self._watch_router)"): (
        f"{UNIT}/liveness/test_watchdog.py::test_a_watchdog_that_cannot_watch_its_router_exits"
    ),
    ("cluster/liveness/watchdog.py", "Thread(self._poll_until_failure)"): (
        f"{UNIT}/liveness/test_watchdog.py::test_a_watchdog_that_cannot_be_polled_is_a_failure"
    ),
    (f"{ROUTING}/router_pool.py", "spawn(self._watch_directory())"): (
        "tests/unit/server/routing/test_failover.py::test_an_ingress_follows_its_routers_after_an_error"
    ),
    (
        f"{ROUTING}/router_pool.py",
        "spawn(promote_shadows(self.drafter_rollout))",
    ): "shadows stay shadows; no request depends on it",
    (
        f"{ROUTING}/client.py",
        "spawn(self._run())",
    ): "its last part notifies all listeners, whatever the error is",
    (f"{ROUTING}/client.py", "spawn(part)"): "the connection ends with it",
    (f"{ROUTING}/client.py", "spawn(self._submit(requests, has_other))"): "the caller awaits it",
    (
        f"{ROUTING}/client.py",
        "spawn(self._abort(list(abort), after))",
    ): "the engine ends the request at its deadline",
    (
        f"{ROUTING}/rollout.py",
        "spawn(self._change(lambda _: speculative, is_whole=True))",
    ): "the caller awaits it",
    (f"{ROUTING}/rollout.py", "spawn(self._change(change, is_whole=False))"): "the caller awaits it",
    (
        f"{ROUTING}/rollout.py",
        "spawn(self._send(client, desired))",
    ): "the next heartbeat shows what is missing",
    ("specray/server/tasks.py", "create_task(work)"): "those who spawn it are listed here",
    ("specray/server/streams.py", "create_task(self._collect())"): "the reply awaits it",
    ("specray/server/streams.py", "create_task(_wait_for_disconnect(receive))"): "the reply awaits it",
    ("specray/server/tokenization.py", "ThreadPoolExecutor"): "the caller awaits it",
    ("specray/server/grammar_check.py", "create_task(self._start(command))"): "the caller awaits it",
    ("specray/server/grammar_check.py", "spawn(_receive(running))"): "the process of the check ends with it",
}


def started() -> set[tuple[str, str]]:
    """(file, call) of everything that starts a thread or a task in processes that serve; a command's end with it."""
    found = set()
    folders = [ROOT / "cluster", ROOT / "specray" / "engine", ROOT / "specray" / "server"]
    for path in [ROOT / "specray" / "heartbeat.py", *(path for folder in folders for path in folder.rglob("*.py"))]:
        name = str(path.relative_to(ROOT))
        if name.startswith("cluster/cli/"):
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            kind = ast.unparse(call.func).rpartition(".")[2]
            if kind == "Thread":
                found.add((name, f"Thread({next(ast.unparse(k.value) for k in call.keywords if k.arg == 'target')})"))
            elif kind == "ThreadPoolExecutor":
                found.add((name, kind))
            elif kind in ("create_task", "spawn", "ensure_future"):
                found.add((name, f"{kind}({', '.join(map(ast.unparse, call.args))})"))
    return found


def test_every_thread_and_task_is_listed_with_what_its_failure_ends() -> None:
    expected = set(THREADS) | {("specray/heartbeat.py", "ensure_future(work)")}  # the caller awaits it
    assert started() == expected


def test_the_tests_exist() -> None:
    for test in THREADS.values():
        path, _, function = test.partition("::")
        assert not function or f"def {function}(" in (ROOT / path).read_text(), test
