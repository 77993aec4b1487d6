"""Where the reasoning of an output ends and its answer begins, found while the text arrives."""

from specray.sampling_params import ReasoningMarks


class AnswerStart:
    """Separates an output's reasoning from its answer. Without `marks`, all of it is answer."""

    def __init__(self, marks: ReasoningMarks | None) -> None:
        self.is_answer = marks is None  # it has begun
        self._start, self._end, self.has_reasoning = marks or ("", "", False)
        self._undecided = ""  # text that may be about to contain a mark

    def feed(self, text: str) -> str:
        """What of the text so far turns out to belong to the answer. Called until the answer has begun."""
        self._undecided += text
        if not self.has_reasoning:
            first = self._undecided.lstrip()
            if self._start.startswith(first) and first != self._start:
                return ""
            self.has_reasoning = first.startswith(self._start)
            self.is_answer = not self.has_reasoning
            if self.is_answer:
                return self._undecided
        _, end, answer = self._undecided.partition(self._end)
        if end:
            self.is_answer = True
            return answer
        self._undecided = self._undecided[1 - len(self._end) :]
        return ""
