"""The time of the first token of transformers' `generate`. Imports nothing else of SpecRay, so peers can use it."""

import time

from transformers.generation.streamers import BaseStreamer


class FirstToken(BaseStreamer):
    """Records the time of the first new token; the prompt is streamed before it."""

    def __init__(self) -> None:
        self._num_calls = 0
        self.time = 0.0

    def put(self, value: object) -> None:
        del value
        self._num_calls += 1
        if self._num_calls == 2:
            self.time = time.perf_counter()

    def end(self) -> None:
        pass
