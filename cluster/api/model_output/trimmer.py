"""Removal of whitespace around a text that arrives in pieces."""


class Trimmer:
    """Withholds whitespace until other characters follow it."""

    def __init__(self, keeps_leading: bool = False) -> None:
        self._is_leading = not keeps_leading  # all text so far was whitespace, and is dropped
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """What can be shown after `text` has arrived."""
        if self._is_leading:
            text = text.lstrip()
            self._is_leading = not text
        shown = text.rstrip()
        if not shown:
            self._held.append(text)
            return ""
        shown = "".join(self._held) + shown
        self._held = [text[len(text.rstrip()) :]]
        return shown

    def held(self) -> str:
        """Whitespace at the end of the text."""
        return "".join(self._held)
