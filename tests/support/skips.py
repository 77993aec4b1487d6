"""The hook that ends pytest's report with what was skipped and why.

With SPECRAY_NO_SKIPS=1, as .ci/run sets it, a test that is skipped for a reason that is not one of EXPECTED fails the
run: a program that a test looks for is missing, and .ci/run should have installed it.
"""

import os
import re
from collections.abc import Iterator, Sequence

import pytest

# What a machine cannot be given, data that is not ours to distribute, and what runs only where it is asked for.
EXPECTED = re.compile(
    r"needs an NVIDIA GPU|needs the package flashinfer-python|kernel's network namespaces|needs a CPU with|on this CPU|"
    r"is not available$|not beside this checkout$|the prompts file is missing|asks (a )?package index"
)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """After everything else that is printed."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):  # of pytest-xdist, whose first process reports
        return
    lines, num_unexpected = skip_lines(reporter.stats.get("skipped", []))
    for line in lines:
        reporter.write_line(line)
    if num_unexpected and os.environ.get("SPECRAY_NO_SKIPS") == "1":
        reporter.write_line(f"{num_unexpected} tests were skipped that must run here (SPECRAY_NO_SKIPS=1)", red=True)
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def skip_lines(reports: Sequence[pytest.TestReport | pytest.CollectReport]) -> tuple[list[str], int]:
    """(one line for each reason, tests or files that were skipped for an unexpected one)."""
    files: dict[str, list[str]] = {}
    for report in reports:
        assert isinstance(report.longrepr, tuple), report  # (file, line, reason)
        files.setdefault(report.longrepr[2].removeprefix("Skipped: "), []).append(report.nodeid.partition("::")[0])
    by_number = sorted(files.items(), key=lambda item: (-len(item[1]), item[0]))
    lines = [f"skipped {len(where)}: {reason} ({', '.join(sorted(set(where)))})" for reason, where in by_number]
    return lines, sum(len(where) for reason, where in by_number if not EXPECTED.search(reason))
