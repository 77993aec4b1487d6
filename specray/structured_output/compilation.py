"""Compiled grammars of a rank: made in a thread beside the step, and kept for later requests."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from transformers import PreTrainedTokenizerFast

from specray.grammar import GrammarSpec

if TYPE_CHECKING:
    from specray.structured_output.compiler import CompiledGrammar, GrammarCompiler
    from specray.structured_output.forced_text import ForcedText

MAX_COMPILED = 128  # grammars that are kept


class GrammarTools(NamedTuple):
    """The tools that depend on the tokenizer."""

    compiler: "GrammarCompiler"
    forced: "ForcedText"


def make_tools(tokenizer: PreTrainedTokenizerFast, vocab_size: int, eos_token_ids: list[int]) -> GrammarTools:
    """Imports llguidance, which a server without structured output never loads."""
    from specray.structured_output.compiler import GrammarCompiler
    from specray.structured_output.forced_text import ForcedText, encoder_of

    compiler = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
    return GrammarTools(compiler, ForcedText(compiler.token_texts(), encoder_of(tokenizer.backend_tokenizer)))


class Compilation:
    """Compiled grammars by what was asked for.

    `make_tools` is called in the compiling thread, once and only if a request has a grammar.
    """

    def __init__(self, make_tools: Callable[[], GrammarTools]) -> None:
        self._make_tools = make_tools
        self._tools: GrammarTools | None = None
        self._compiled: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specray-grammar")

    @property
    def tools(self) -> GrammarTools:
        """Those of the compiled grammars; there is at least one."""
        assert self._tools is not None
        return self._tools

    def start(self, spec: GrammarSpec) -> "Future[CompiledGrammar]":
        """The compiled grammar, or InvalidRequestError, when it is ready."""
        with self._lock:
            future = self._compiled.pop(spec, None)
            if future is None or (future.done() and (future.exception() is not None or future.result().is_full)):
                future = self._thread.submit(self._compile, spec)
            self._compiled[spec] = future
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return future

    def _compile(self, spec: GrammarSpec) -> "CompiledGrammar":
        if self._tools is None:
            self._tools = self._make_tools()
        return self._tools.compiler.compile(spec)
