"""Chats whose characters are disguised, which shows what a chat template writes by itself.

`specray.models.tokenizer` renders them and compares. Disguised characters are rare Chinese ones: they have no case, and
are printable where templates write a `repr`.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from string import ascii_lowercase
from typing import Any, NamedTuple

from jinja2 import Environment

Message = Mapping[str, Any]
HIDDEN = 0x20000  # the first disguised character
_FIRST_CHINESE, _NUM_FOLDED = 0x3000, 0x6000
_VISIBLE = re.compile("[^\U00020000-\U00028fff]+")
_NAMING_KEYS = ("name", "type", "required")  # templates compare their values with constants, or with keys
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # which transformers copies to each other
_DECODING = re.compile(r"\b(?:striptags|unescape|decode)\b")  # of Jinja and Python; they make characters of numbers


class TemplateInput(NamedTuple):
    """The input of a template."""

    messages: Sequence[Message]
    tools: Sequence[Message]
    variables: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


class Disguise(dict[int, int]):
    """A table for `str.translate` that replaces the characters that `hides` is true for by disguised ones.

    Chinese characters stay, but not those from far blocks of which a normalizer makes others (U+FF1C is "<" to NFKC).
    `stand_ins` are replaced by ordinary letters instead, which a template cannot tell from a user's. Threads share a
    table, so each entry is written once.
    """

    def __init__(self, hides: Callable[[str], bool], stand_ins: Mapping[int, int] | None = None) -> None:
        super().__init__(stand_ins or {})
        self._stand_ins = dict(stand_ins or {})
        self._hides = hides

    def __missing__(self, code: int) -> int:
        disguised = code
        if self._hides(char := chr(code)):
            if code < _FIRST_CHINESE:
                disguised = HIDDEN + code
            elif min(unicodedata.normalize("NFKC", char)) < chr(_FIRST_CHINESE):  # no two have the same remainder
                disguised = HIDDEN + _FIRST_CHINESE + code % _NUM_FOLDED
        self[code] = disguised
        return disguised

    def are_equal(self, first: str, second: str) -> bool:
        """Whether two renderings are equal but for disguised characters."""
        disguised = (each.translate(self._stand_ins).translate(EVERYTHING) for each in (first, second))
        return next(disguised) == next(disguised)


# White space is trimmed by templates, and JSON or a `repr` depends on the others.
EVERYTHING = Disguise(lambda char: not (char.isspace() or char < " " or char in "\"'\\"))


class TemplateWords(NamedTuple):
    """What a template may look for in a chat: names, which are not disguised, and other texts."""

    known: frozenset[str]
    two_of_each_special: Disguise
    one_of_each_special: Disguise  # leaves more texts as they are, but a template may make its characters of others
    decodes: bool  # whether it may make any character of others, such as numbers
    is_part: Callable[[str], bool]  # whether a name could be a part of a special token

    @classmethod
    def of(cls, template: str, specials: Sequence[str], spells_special: Callable[[str], bool]) -> "TemplateWords":
        """Of a template's source. `spells_special` says whether a text contains one of the special tokens."""
        names, constants = _names_and_constants(template)
        constants = [constant for constant in constants if not spells_special(constant)]
        is_part = _part_of(specials)
        # A tool or a style may have two words.
        known = {name for name in names if not spells_special(name)} | {each for each in constants if not is_part(each)}
        choices = [_rarest_chars(special, constants) for special in specials]
        first, both = ({char for chosen in choices for char in chosen[:count]} for count in (1, 2))
        return cls(
            frozenset(known),
            Disguise(_hides_any(both), _stand_ins(both, constants)),
            Disguise(_hides_any(first)),
            bool(_DECODING.search(template)),
            is_part,
        )


def disguised_chat(chat: TemplateInput, disguise: Disguise, words: TemplateWords) -> TemplateInput:
    """`chat` with disguised texts. Roles and names that the template knows stay.

    Names that could be a part of a special token are disguised as a whole: the template may write the rest beside them.
    """

    def name(value: Any) -> Any:
        if not isinstance(value, str) or value in words.known:
            return value
        return value.translate(EVERYTHING if words.is_part(value) else disguise)

    def copy(value: Any, key: object = None) -> Any:
        if isinstance(value, str):
            return name(value) if key in _NAMING_KEYS else value.translate(disguise)
        if isinstance(value, Mapping):
            return {name(each): copy(inner, each) for each, inner in value.items()}
        if isinstance(value, list | tuple):
            return [copy(inner, key) for inner in value]
        return value

    def message(value: Message) -> Message:
        role = value.get("role")
        return {**copy(value), **({"role": role} if isinstance(role, str) and role.isidentifier() else {})}

    return chat._replace(
        messages=[message(each) for each in chat.messages],
        tools=[copy(tool) for tool in chat.tools],
        variables={each: copy(value, _NAMING_KEYS[0]) for each, value in chat.variables.items()},
    )


def visible_pieces(rendered: str) -> Iterator[tuple[int, str]]:
    """Where the texts between disguised characters begin, and these texts."""
    return ((visible.start(), visible[0]) for visible in _VISIBLE.finditer(rendered))


def _names_and_constants(template: str) -> tuple[frozenset[str], list[str]]:
    """The names of a template's attributes and constants, and all constants."""
    tokens = [(kind, text) for _, kind, text in Environment().lex(template) if kind != "whitespace"]
    constants = [text[1:-1] for kind, text in tokens if kind == "string"]
    attributes = [text for (_, before), (kind, text) in pairwise(tokens) if kind == "name" and before == "."]
    steps = (step for constant in constants for step in constant.split("."))  # map(attribute="function.name")
    names = (name for name in (*steps, *attributes, *_REASONING_KEYS) if re.fullmatch(r"[\w-]+", name))
    return frozenset(names), constants


def _rarest_chars(special: str, constants: Sequence[str]) -> list[str]:
    """Two characters of a special token, of those that are rarest in the template's constants.

    The second one is a letter: a template that makes other characters of messages, as `&lt;` becomes "<", makes
    punctuation. Letters change by case, and normalizers write an underline for a space, so they are the last choice.
    """
    compared = Counter(_folded("".join(constants)))
    chars = [char for char in _folded(special) if not char.isspace() and char not in '"\\\u2581']
    by_rarity = sorted(dict.fromkeys(chars), key=lambda char: (char.isalnum(), compared[char]))
    letters = [char for char in by_rarity[1:] if char.isalpha()]
    return [*by_rarity[:1], *(letters or by_rarity[1:])[:1]]


def _stand_ins(chosen: set[str], constants: Sequence[str]) -> dict[int, int]:
    """Another letter for each chosen one of ASCII, which the template hardly compares texts with."""
    compared = Counter(_folded("".join(constants)))
    other = min(set(ascii_lowercase) - chosen, key=lambda char: (compared[char], char), default=None)
    letters = chosen & set(ascii_lowercase) if other else set()
    lower = {ord(letter): ord(str(other)) for letter in letters}
    return lower | {ord(letter.upper()): ord(str(other).upper()) for letter in letters}


def _hides_any(chosen: set[str]) -> Callable[[str], bool]:
    """Whether a character can become a chosen one."""
    return lambda char: not chosen.isdisjoint(_folded(char + char.upper() + char.lower()))


def _part_of(specials: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name could be a part of a special token: it is a piece of one, or has one's punctuation."""
    joined = "\n".join("".join(_folded(special).split()) for special in specials)
    punctuation = {char for char in joined if not char.isalnum()} - set("_-\n")

    def is_part(name: str) -> bool:
        letters = "".join(_folded(name).split())
        return letters in joined or not punctuation.isdisjoint(letters)

    return is_part


def _folded(text: str) -> str:
    """`text` without the differences that a tokenizer's normalizer may remove."""
    return unicodedata.normalize("NFKD", text).casefold()
