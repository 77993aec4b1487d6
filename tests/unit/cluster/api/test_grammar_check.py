"""The process that compiles grammars for the API, and what a client is told."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from cluster.api.errors import ApiError
from cluster.api.grammar_check import GrammarCheck, check_command
from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec, make_grammar
from tests.support.json_toy import write_json_toy
from tests.support.toy import EOS, VOCAB_SIZE

SPEC = make_grammar("regex", "a")


async def outcome(check: GrammarCheck, spec: GrammarSpec, command: Sequence[str], tenant: str = "") -> str | None:
    try:
        await check.check(spec, tenant, command)
    except InvalidRequestError as error:
        return str(error)
    return None


def test_good_grammars_pass_and_bad_ones_are_explained(tmp_path: Path) -> None:
    """Also one that would take too much, and those that come after the process was killed."""
    random = Random(0)
    words = ["".join(random.choices("abcdefghij", k=20)) for _ in range(8000)]
    good = make_grammar("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}})
    bad, bomb = make_grammar("regex", "(a"), make_grammar("choice", words)
    command = check_command(str(write_json_toy(tmp_path)), VOCAB_SIZE, [EOS])

    async def run() -> None:
        check = GrammarCheck()
        outcomes = await asyncio.gather(*(outcome(check, spec, command) for spec in (good, bad, bomb)))
        assert outcomes[0] is None
        assert "parenthesis" in str(outcomes[1])
        assert "takes more" in str(outcomes[2])
        assert check._process is not None
        check._process.kill()
        await check._process.wait()
        assert await outcome(check, bad, command) == outcomes[1]  # known, so no process is started
        assert check._process.returncode is not None
        assert await outcome(check, make_grammar("regex", "b"), command) is None
        await check.close()

    asyncio.run(run())


def test_a_process_that_does_not_start_or_ends_is_a_503() -> None:
    async def run() -> None:
        check = GrammarCheck()
        with pytest.raises(ApiError, match="did not start"):
            await check.check(SPEC, "", [sys.executable, "-c", "pass"])
        with pytest.raises(ApiError, match="has ended"):
            await check.check(SPEC, "", [sys.executable, "-c", "print('ready', flush=True); input()"])
        await check.close()

    asyncio.run(run())


def test_a_tenant_has_one_grammar_compiled_at_a_time() -> None:
    """So that another tenant's is compiled beside a flood of expensive ones."""
    code = (
        "import sys, time; print('ready', flush=True)\n"
        "for line in sys.stdin: time.sleep(0.05); print(f'[{line[1]}, null]', flush=True)"
    )

    async def run() -> None:
        check, ended = GrammarCheck(), []

        async def one(tenant: str, text: str) -> None:
            await check.check(make_grammar("regex", text), tenant, [sys.executable, "-c", code])
            ended.append(tenant)

        await asyncio.gather(*(one("a", "x" * size) for size in range(1, 5)), one("b", "y"))
        assert ended.index("b") < 2
        await check.close()

    asyncio.run(run())
