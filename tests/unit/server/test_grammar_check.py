"""The process that compiles grammars for the API, and the errors that clients get."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec, make_grammar
from specray.server import grammar_check
from specray.server.errors import ApiError
from specray.server.grammar_check import GrammarCheck, check_command
from tests.support.json_toy import write_json_toy
from tests.support.toy import EOS, VOCAB_SIZE, write_toy

SPEC = make_grammar("regex", "a")


async def outcome(check: GrammarCheck, spec: GrammarSpec, command: Sequence[str], tenant: str = "") -> str | None:
    try:
        await check.check(spec, tenant, command)
    except InvalidRequestError as error:
        return str(error)
    return None


def test_good_grammars_pass_and_bad_ones_are_explained(tmp_path: Path) -> None:
    """Also one that would take too much, and those that come after the process was killed."""
    patterns = {f"p{n}": {"type": "string", "pattern": ".*" * 1000 + str(n)} for n in range(100, 150)}
    good = make_grammar("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}})
    bad, bomb = (
        make_grammar("regex", "(a"),
        make_grammar("json_schema", {"properties": patterns}),
    )
    command = check_command(str(write_json_toy(tmp_path)), VOCAB_SIZE, [EOS])

    async def run() -> None:
        check = GrammarCheck()
        outcomes = await asyncio.gather(*(outcome(check, spec, command) for spec in (good, bad, bomb)))
        assert outcomes[0] is None
        assert "unclosed group" in str(outcomes[1])
        assert "needs too much work" in str(outcomes[2])
        process, _ = await check._running(command)
        process.kill()
        await process.wait()
        assert await outcome(check, bad, command) == outcomes[1]  # known, so no process is started
        assert check._started is not None
        assert check._started.result().process is process
        assert await outcome(check, make_grammar("regex", "b"), command) is None
        await check.close()

    asyncio.run(run())


def test_a_vocabulary_that_cannot_spell_json_has_grammars_too(tmp_path: Path) -> None:
    """The process once compiled such JSON when it started, and ended."""
    command = check_command(str(write_toy(tmp_path)), VOCAB_SIZE, [EOS])

    async def run() -> None:
        check = GrammarCheck()
        assert await outcome(check, make_grammar("regex", "(ab)+"), command) is None
        assert "no output matches" in str(await outcome(check, make_grammar("json_object"), command))
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


SLOW_START = "import sys, time; time.sleep(0.3); print('ready', flush=True)\n"
ANSWER = "import sys\nfor line in sys.stdin: print(f'[{line.split(chr(44))[0][1:]}, null]', flush=True)"


def test_a_process_that_starts_slowly_is_waited_for_and_started_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the request that started it has gone."""
    monkeypatch.setattr(grammar_check, "START_TIMEOUT_S", 0.05, raising=False)  # a limit that there was
    starts = tmp_path / "starts"
    command = [sys.executable, "-c", f"open({str(starts)!r}, 'a').write('x')\n{SLOW_START}{ANSWER}"]

    async def run() -> None:
        check = GrammarCheck()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(check.check(SPEC, "", command), 0.1)
        texts = ("b", "c")
        await asyncio.gather(*(check.check(make_grammar("regex", text), text, command) for text in texts))
        await check.close()

    asyncio.run(run())
    assert starts.read_text() == "x"


def test_a_process_that_ends_is_replaced_once(tmp_path: Path) -> None:
    """As when the system kills it for its memory."""
    starts = tmp_path / "starts"
    ends_first = (
        f"from pathlib import Path\nstarts = Path({str(starts)!r})\nis_first = not starts.exists()\nstarts.touch()\n"
        f"print('ready', flush=True)\nif is_first: input(); raise SystemExit\n{ANSWER}"
    )

    async def run() -> None:
        check = GrammarCheck()
        await check.check(SPEC, "", [sys.executable, "-c", ends_first])
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
