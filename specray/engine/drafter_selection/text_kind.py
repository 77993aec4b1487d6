"""What kind of text a prompt asks for, guessed cheaply from the prompt alone.

The kinds only have to separate prompts for which different drafters are good; which one is good for which kind is
measured. Drafters that look up earlier text are good where the prompt repeats itself or is long, because answers then
often quote it; code is repetitive and predictable; the rest is a conversation.
"""

import re
from collections.abc import Sequence
from enum import Enum

NUM_TOKENS = 1024  # the end of the prompt is looked at
NGRAM = 4
REPEATED_SHARE = 0.25  # of a prompt's n-grams: more than this many are repeated in COPY
LONG_PROMPT = 384  # tokens: a prompt that brings a text to work with
PASTED_CHARACTERS = 200  # after a blank line: a text below an instruction
CODE_SHARE = 0.04  # characters that are frequent in code and rare in prose
INDENTED_SHARE = 0.5  # of lines
_CODE = re.compile(r"[{}()\[\];=<>_]")
# Of a chat, the last turn is read. A template names the speaker on a line of its own, in some with a blank line after
# it. Special tokens before the name are not in the text, so it may follow the turn before directly.
_USER = re.compile(r"user\n+")


class TextKind(Enum):
    CHAT = "chat"
    CODE = "code"
    COPY = "copy"


def text_kind(token_ids: Sequence[int], text: str) -> TextKind:
    """The kind of a prompt whose last tokens are `token_ids` and spell `text`, without special tokens."""
    turn = _USER.split(text)[-1]
    pasted = turn.partition("\n\n")[2].removesuffix("assistant\n\n")
    has_pasted = len(pasted) >= PASTED_CHARACTERS
    read = pasted if has_pasted else turn  # a template's header and the instruction are prose even for code
    if "```" in text or _is_code(read):
        return TextKind.CODE
    if has_pasted or len(token_ids) >= LONG_PROMPT or repeated_share(token_ids) > REPEATED_SHARE:
        return TextKind.COPY
    return TextKind.CHAT


def _is_code(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    is_indented = sum(line[0] in " \t" for line in lines) > INDENTED_SHARE * len(lines)
    return is_indented or len(_CODE.findall(text)) > CODE_SHARE * len(text)


def repeated_share(token_ids: Sequence[int]) -> float:
    """Share of the n-grams that have occurred before in the same prompt."""
    ngrams = [tuple(token_ids[place : place + NGRAM]) for place in range(len(token_ids) - NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
