"""Variants of a comparison: an engine with one drafting method that answers requests and times them.

`transformers_variant` has the baseline, `measure` order and repeats, `report` the statistics.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from pydantic import ValidationError

from specray.config import EMBEDDED_MODEL, CorpusOptions, EngineConfig, SpeculativeConfig
from specray.engine.engine_request import EngineRequest
from specray.errors import ConfigError, EngineDeadError
from specray.llm import LLM
from specray.models.target_model import TargetModel
from specray.outputs import FinishReason, RequestOutput, RequestUsage
from specray.sampling_params import SamplingParams
from specray.spec_decode import DRAFTERS, check_speculative
from specray.worker.local import LocalExecutor

PLAIN = "plain"
CORPUS = "corpus:"  # before the name of a corpus, or its file
TRANSFORMERS = "transformers"
ALIASES = {"eagle2": "EAGLE"}  # other names of methods, and their keys in DRAFTERS
# Heads of the package for the embedded model: the default for these methods.
EMBEDDED_HEADS = {
    "EAGLE3": f"{EMBEDDED_MODEL}-eagle3",
    "EAGLE": f"{EMBEDDED_MODEL}-eagle2",
    "MTP": f"{EMBEDDED_MODEL}-mtp",
}
VARIANT = re.compile(
    r"(?P<method>[a-z0-9]+)(@(?P<head>[^+]+?))?(\+(?P<token_map>.+?))?(:(?P<tree>[^:]*))?", re.IGNORECASE | re.DOTALL
)
TREE = re.compile(r"(?P<num_draft_tokens>\d+)|(?P<steps>\d+)-(?P<topk>\d+)-(?P<nodes>\d+)(\+(?P<merged>\d+))?")


class BenchRequest(NamedTuple):
    """One prompt to answer; `params.seed` is set."""

    token_ids: list[int]
    params: SamplingParams


@dataclass(slots=True)
class TimedReply:
    """One request's answer and times, in seconds."""

    token_ids: list[int] = field(default_factory=list)
    ttft: float = 0.0  # time from submission to the first token
    seconds: float = 0.0  # time from submission to the last token
    usage: RequestUsage | None = None  # None: the variant does not verify

    @property
    def tpot(self) -> float | None:
        """Mean gap between tokens after the first; None where there is none."""
        return (self.seconds - self.ttft) / (len(self.token_ids) - 1) if len(self.token_ids) > 1 else None


@dataclass(frozen=True, slots=True)
class Run:
    """One variant's pass over some requests."""

    replies: list[TimedReply]
    seconds: float
    host_shares: list[float]  # the host's share of each engine step
    full_tokens: int = 0  # tokens of the steps in which as many requests as allowed were running
    full_seconds: float = 0.0  # duration of these steps
    decode_tokens: int = 0  # tokens of those of these steps that read no prompt
    decode_seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return sum(len(reply.token_ids) for reply in self.replies) / self.seconds

    @property
    def full_tokens_per_s(self) -> float:
        """The speed while as many requests as allowed were running; that of the whole run if they never were."""
        return self.full_tokens / self.full_seconds if self.full_seconds else self.tokens_per_s


class Variant(Protocol):
    @property
    def name(self) -> str: ...

    def run(self, requests: Sequence[BenchRequest], concurrency: int, cache_salt: str) -> Run:
        """Answer `requests` in order, at most `concurrency` at once, sharing nothing between cache salts."""
        ...


def parse_method(name: str, config: EngineConfig = EngineConfig()) -> SpeculativeConfig:  # noqa: B008
    """The speculative options named by `plain`, corpus:NAME or METHOD[@HEAD][+MAP][:TREE] (see `bench --help`).

    Options of `config.speculative` apply to the same method; those in the name override them. Raises ConfigError for an
    unknown name.
    """
    if name.lower() == PLAIN:
        return SpeculativeConfig()
    if name.startswith(CORPUS):
        return _speculative(name, {"algorithm": "NGRAM", "corpora": [_corpus(name.removeprefix(CORPUS), config)]})
    match = VARIANT.fullmatch(name)
    algorithm = algorithm_of(match["method"]) if match else None
    if match is None or algorithm is None:
        known = ", ".join([PLAIN, TRANSFORMERS, f"{CORPUS}NAME", *(drafter.lower() for drafter in DRAFTERS), *ALIASES])
        raise ConfigError(
            f"variant {name!r} is unknown; choose from {known}, with @HEAD for a draft head, +FILE for a token map and "
            ":N or :STEPS-TOPK-N for a tree of N nodes (ngram:8, eagle3:5-4-16)"
        )
    return _speculative(name, _base(algorithm, config) | _named_files(match) | tree_options(match["tree"], name))


def _corpus(name: str, config: EngineConfig) -> CorpusOptions:
    """The configured corpus of this name; without one, the file."""
    named = {each.name: each for member in config.speculative.members.values() for each in member.corpora}
    return named.get(name) or CorpusOptions(name="file", path=name)


def algorithm_of(method: str) -> str | None:
    """The key of DRAFTERS for a method's name, in any case; None if there is none."""
    algorithm = ALIASES.get(method.lower(), method.upper())
    return algorithm if algorithm in DRAFTERS else None


def tree_options(tree: str | None, place: str) -> dict[str, int | None]:
    """Options of a tree written `N` or `STEPS-TOPK-N[+M]`, without a limit on a step's draft tokens; none for None.

    Raises ConfigError naming `place`.
    """
    if tree is None:
        return {}
    match = TREE.fullmatch(tree)
    if match is None:
        raise ConfigError(
            f"{place!r}: the tree {tree!r} is neither N nodes nor STEPS-TOPK-N[+M]; choose such as 5-4-16"
        )
    if match["num_draft_tokens"]:
        return {"num_draft_tokens": int(tree), "max_step_draft_tokens": None}
    merged = {"merged_draft_tokens": int(match["merged"])} if match["merged"] else {}
    return merged | {
        "num_steps": int(match["steps"]),
        "eagle_topk": int(match["topk"]),
        "num_draft_tokens": int(match["nodes"]),
        "max_step_draft_tokens": None,
    }


def with_tree(config: SpeculativeConfig, tree: str) -> SpeculativeConfig:
    """`config` with another tree. Raises ConfigError."""
    return _speculative(tree, config.model_dump() | tree_options(tree, tree))


def tree_name(config: SpeculativeConfig) -> str:
    """The tree in the format of `tree_options`; `auto` if the method chooses it."""
    if config.num_steps and config.eagle_topk and config.num_draft_tokens:
        merged = f"+{config.merged_draft_tokens}" if config.merged_draft_tokens else ""
        return f"{config.num_steps}-{config.eagle_topk}-{config.num_draft_tokens}{merged}"
    return str(config.num_draft_tokens or "auto")


def _base(algorithm: str, config: EngineConfig) -> dict[str, Any]:
    if config.speculative.algorithm == algorithm:
        return config.speculative.model_dump()
    head = EMBEDDED_HEADS.get(algorithm) if config.model == EMBEDDED_MODEL else None
    fields = {"algorithm": algorithm, "draft_model_path": head}
    if "draft_model_quantization" in DRAFTERS[algorithm].options:
        fields["draft_model_quantization"] = "auto"  # as in configs/
    return fields


def _named_files(match: re.Match[str]) -> dict[str, str | None]:
    """A head named in a variant does not use the configured revision and format."""
    defaults = SpeculativeConfig()
    fields: dict[str, str | None] = {}
    if match["head"]:
        fields = {
            "draft_model_path": match["head"],
            "draft_model_revision": defaults.draft_model_revision,
            "draft_load_format": defaults.draft_load_format,
        }
    return fields | ({"token_map": match["token_map"]} if match["token_map"] else {})


def _speculative(name: str, fields: dict[str, Any]) -> SpeculativeConfig:
    """The validated options."""
    try:
        config = SpeculativeConfig.model_validate(fields)
        check_speculative(config)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"variant {name!r}: {place}={first['input']!r}: {first['msg']}; choose another") from None
    except ConfigError as error:
        raise ConfigError(f"variant {name!r}: {error}") from None
    return config


def target_of(llm: LLM) -> TargetModel:
    """The target's weights behind an in-process engine."""
    executor = llm.engine.executor
    assert isinstance(executor, LocalExecutor)
    return executor.worker.model


class EngineVariant:
    """Our engine, driven step by step."""

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = name
        self._engine = llm.engine
        self._num_requests = 0

    def run(self, requests: Sequence[BenchRequest], concurrency: int, cache_salt: str) -> Run:
        waiting = [self._request(request, cache_salt) for request in reversed(requests)]
        order = [request.request_id for request in reversed(waiting)]
        replies: dict[str, TimedReply] = {}
        running: dict[str, float] = {}  # request id -> when it was submitted
        host_shares = []
        full_tokens, full_seconds, decode_tokens, decode_seconds = 0, 0.0, 0, 0.0
        start = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < concurrency:
                request = waiting.pop()
                self._engine.add_request(request)
                running[request.request_id], replies[request.request_id] = time.perf_counter(), TimedReply()
            is_full, began = len(running) == concurrency, time.perf_counter()
            only_decodes = all(replies[request_id].token_ids for request_id in running)
            shares, num_tokens = self._step(running, replies)
            host_shares += shares
            took = time.perf_counter() - began
            if is_full:
                full_tokens, full_seconds = full_tokens + num_tokens, full_seconds + took
            if is_full and only_decodes:
                decode_tokens, decode_seconds = decode_tokens + num_tokens, decode_seconds + took
        seconds = time.perf_counter() - start
        self._engine.step()  # frees the last slots
        answers = [replies[request_id] for request_id in order]
        return Run(answers, seconds, host_shares, full_tokens, full_seconds, decode_tokens, decode_seconds)

    def _step(self, running: dict[str, float], replies: dict[str, TimedReply]) -> tuple[list[float], int]:
        """One engine step: its host share, if it did anything, and its tokens."""
        phases = self._engine.stats.labelled["specray_step_seconds_total"]
        before = dict(phases)
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            _note(replies[output.request_id], output, now - running[output.request_id])
            if output.finish_reason is not None:
                del running[output.request_id]
        spent = {phase: seconds - before.get(phase, 0.0) for phase, seconds in phases.items()}
        total = sum(spent.values())
        num_tokens = sum(len(output.token_ids) for output in outputs)
        return [spent["host"] / total] if total else [], num_tokens

    def _request(self, request: BenchRequest, cache_salt: str) -> EngineRequest:
        self._num_requests += 1
        return EngineRequest(f"{self.name}-{self._num_requests}", request.token_ids, request.params, cache_salt)


def _note(reply: TimedReply, output: RequestOutput, elapsed: float) -> None:
    if output.finish_reason is FinishReason.ERROR:
        raise EngineDeadError(f"{output.request_id}: {output.error}")
    if output.token_ids and not reply.token_ids:
        reply.ttft = elapsed
    reply.token_ids += output.token_ids
    reply.seconds, reply.usage = elapsed, output.usage
