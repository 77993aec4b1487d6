"""Grammars made to take time, memory or the process: each is compiled or gets a 400, and the event loop goes on."""

import asyncio
import random
import string
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specray.errors import InvalidRequestError
from specray.grammar import GrammarKind, GrammarSpec, make_grammar
from specray.server.grammar_check import GrammarCheck, check_command
from tests.support.json_toy import write_json_toy
from tests.support.toy import EOS, VOCAB_SIZE

Bomb = tuple[GrammarKind, Any]
NUM_TENANTS = 2


@dataclass(slots=True)
class GrammarFindings:
    """What became of the grammars."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest_s: float = 0.0  # of one grammar, once it was its tenant's turn
    longest_stall_s: float = 0.0  # of the event loop


def _nested(opening: str, closing: str, depth: int, inside: str = "a") -> str:
    return opening * depth + inside + closing * depth


def _letters(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(string.ascii_lowercase[:10], k=length))


def _deep_schema(rng: random.Random) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(rng.choice((50, 500, 5000))):
        schema = rng.choice(
            (
                {"type": "array", "items": schema},
                {"type": "object", "properties": {"a": schema}},
                {"anyOf": [schema, {"type": "integer"}]},
            )
        )
    return schema


def _wide_schema(rng: random.Random) -> Any:
    names = [_letters(rng, 12) for _ in range(rng.choice((100, 1000, 4000)))]
    return {"type": "object", "properties": {name: {"type": "string", "maxLength": 200} for name in names}}


def _recursive_schema(rng: random.Random) -> Any:
    names = [f"d{number}" for number in range(rng.choice((2, 20, 200)))]
    parts = [{"$ref": f"#/$defs/{name}"} for name in names]
    object_of = {"type": "object", "properties": dict(zip(names, parts, strict=True))}
    return {"$ref": "#/$defs/d0", "$defs": {name: {"anyOf": [object_of, *parts]} for name in names}}


def _long_bounds(rng: random.Random) -> Any:
    most = rng.choice((1000, 100_000, 10**9, 2**31, 2**63, 10**30))
    return rng.choice(
        (
            {"type": "string", "minLength": most - 1, "maxLength": most},
            {"type": "array", "items": {"type": "string", "maxLength": 500}, "minItems": most, "maxItems": most},
            {"type": "integer", "minimum": -most, "maximum": most},
            {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": most},
        )
    )


def _rules(rng: random.Random) -> str:
    count = rng.choice((100, 2000))
    rules = [f"r{n} ::= r{(n + 1) % count} r{rng.randrange(count)} | {_letters(rng, 3)!r}" for n in range(count)]
    return "root ::= r0\n" + "\n".join(rules).replace("'", '"')


def _tags(rng: random.Random) -> Any:
    contents = [
        {"type": "json_schema", "json_schema": schema}
        for schema in (_wide_schema(rng), _long_bounds(rng), _recursive_schema(rng))
    ]
    tags = [
        {"type": "tag", "begin": f"<{_letters(rng, 8)}>", "content": content, "end": "</x>"} for content in contents
    ]
    return {"type": "structural_tag", "format": {"type": "tags_with_separator", "tags": tags, "separator": "\n"}}


REGEXES: list[Callable[[random.Random], str]] = [
    lambda rng: _nested("(", ")*", rng.choice((10, 1000, 50_000))),
    lambda rng: _nested("(", "+)+", rng.choice((10, 1000)), "a"),
    lambda rng: "(a|aa)*" * rng.choice((10, 1000)) + "b",
    lambda rng: f"(a{{1,{rng.choice((1000, 10**6, 10**9))}}}){{1,{rng.choice((10, 1000, 10**9))}}}",
    lambda rng: "[a-z]{0,99}" * rng.choice((10, 200, 5000)),
    lambda rng: ".*" * rng.choice((100, 10_000)) + "x",
    lambda rng: "(" + "|".join(_letters(rng, 30) for _ in range(rng.choice((500, 5000)))) + ")*",
    lambda rng: "[" + "".join(chr(0x4E00 + rng.randrange(20_000)) for _ in range(5000)) + "]{1,500}",
    lambda rng: "\\p{L}{1,9999}[^\\w\\s]{2,}" * rng.choice((1, 300)),
    lambda rng: "(?=a)(?!b)(?<=c)\\1" * rng.choice((1, 100)),
    lambda rng: _letters(rng, 9) + rng.choice(("(", "[", "{1", "\\", "*", "{9,1}", "(?P<", "[z-a]", "\x00", "\ud7ff")),
]
SCHEMAS: list[Callable[[random.Random], Any]] = [_deep_schema, _wide_schema, _recursive_schema, _long_bounds]
EBNFS: list[Callable[[random.Random], str]] = [
    _rules,
    lambda rng: "root ::= " + _nested("(", ")*", rng.choice((10, 1000, 50_000)), '"a"'),
    lambda rng: "root ::= root root | root" * rng.choice((1, 50)),
    lambda rng: f'root ::= ("a" | "b"){{{rng.choice((10**3, 10**6, 10**9))}}}',
    lambda rng: 'root ::= "' + "a" * rng.choice((1000, 200_000)) + '"',
    lambda rng: "root ::= " + rng.choice(("x", '"', "[", "[^", "(", '"\\', "root", '""', "")),
]


def make_bomb(rng: random.Random) -> Bomb:
    """A grammar whose compilation should take long, much memory, deep recursion, or fail."""
    match rng.randrange(8):
        case 0 | 1:
            return "regex", rng.choice(REGEXES)(rng)
        case 2 | 3 | 4:
            return "json_schema", rng.choice(SCHEMAS)(rng)
        case 5:
            return "structural_tag", _tags(rng)
        case 6:
            return "choice", [_letters(rng, 20) for _ in range(rng.choice((100, 3000, 9000)))]
        case _:
            return "ebnf", rng.choice(EBNFS)(rng)


async def fuzz_grammars(folder: Path, num_grammars: int, seed: int) -> GrammarFindings:
    """Compile `num_grammars` for the tokenizer of a toy model, written to `folder`, as requests of two tenants."""
    findings, rng, start = GrammarFindings(), random.Random(seed), time.perf_counter()
    command = check_command(str(write_json_toy(folder)), VOCAB_SIZE, [EOS])
    check = GrammarCheck()
    try:
        await check.check(make_grammar("regex", "a"), "", command)  # the process has started
        watching = asyncio.create_task(_watch_stalls(findings))
        for _ in range(0, num_grammars, NUM_TENANTS):
            bombs = [make_bomb(rng) for _ in range(NUM_TENANTS)]
            await asyncio.sleep(0)
            await asyncio.gather(*(_compile(check, bomb, str(n), command, findings) for n, bomb in enumerate(bombs)))
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        await check.check(make_grammar("regex", "b"), "", command)
        process, _ = await check._running(command)
        if process.returncode is not None:
            findings.problems.append("the process that compiles grammars has ended")
    finally:
        await check.close()
    findings.seconds = time.perf_counter() - start
    return findings


async def _compile(check: GrammarCheck, bomb: Bomb, tenant: str, command: list[str], findings: GrammarFindings) -> None:
    kind, value = bomb
    begin = time.perf_counter()
    try:
        spec: GrammarSpec = make_grammar(kind, value)
        await check.check(spec, tenant, command)
        outcome = "compiled"
    except InvalidRequestError:
        outcome = "refused"
    except Exception as error:
        outcome = "failed"
        findings.problems.append(f"{type(error).__name__}: {error}: {kind} {value!r:.200}")
    findings.outcomes[f"{kind} {outcome}"] += 1
    findings.slowest_s = max(findings.slowest_s, time.perf_counter() - begin)


async def _watch_stalls(findings: GrammarFindings) -> None:
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(0.01)
        findings.longest_stall_s = max(findings.longest_stall_s, loop.time() - before - 0.01)
