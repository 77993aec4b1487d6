"""Which tokens of a prompt are found again where the model has states; test_scheduler has random requests."""

from dataclasses import replace

from specray.config import EngineConfig
from specray.engine.engine import Engine
from specray.engine.stored_states import INTERVAL
from tests.unit.engine.fake_executor import FakeExecutor, letters_tokenizer, request, run_to_end

SYSTEM = [2, 3, 4, 5, 6, 7, 8, 9, 10]  # two blocks and a token


class Client:
    """Sends one request after the other."""

    def __init__(self, num_stored_states: int) -> None:
        config = EngineConfig(page_size=4, max_running_requests=2, chunked_prefill_size=5, max_prefill_tokens=6)
        self.executor = FakeExecutor(config, 200, 3, [(3, 2)], context_length=500, num_stored_states=num_stored_states)
        self.engine = Engine(config, self.executor, letters_tokenizer())
        self._num_sent = 0

    def send(self, prompt: list[int], num_output_tokens: int = 1, salt: str = "") -> tuple[int, list[int]]:
        """(tokens of the prompt that the prefix cache has, the output)."""
        seed, self._num_sent = self._num_sent, self._num_sent + 1
        self.executor.max_lengths[seed] = len(prompt) + num_output_tokens
        new = request(seed, prompt, num_output_tokens, salt)
        self.engine.add_request(replace(new, params=replace(new.params, ignore_eos=True)))
        outputs = run_to_end(self.engine)
        return outputs[-1].usage.num_cached_tokens, [token for output in outputs for token in output.token_ids]

    def num_cached(self, prompt: list[int], salt: str = "") -> int:
        return self.send(prompt, salt=salt)[0]


def test_a_prompt_is_found_up_to_its_last_full_block() -> None:
    client = Client(8)
    assert [client.num_cached(SYSTEM) for _ in range(2)] == [0, 8]
    assert client.num_cached(SYSTEM[:8]) == 0, "the state behind its first block is not stored"
    assert client.num_cached(SYSTEM, salt="another tenant") == 0


def test_a_shared_beginning_is_found_by_the_third_request_that_has_it() -> None:
    client = Client(8)
    assert [client.num_cached([*SYSTEM, *[question] * 12]) for question in (11, 12, 13)] == [0, 0, 8]


def test_the_next_turn_of_a_conversation_finds_the_answer_before_it() -> None:
    client = Client(8)
    turn = SYSTEM + client.send(SYSTEM, 2 * INTERVAL + 20)[1]
    assert client.engine.scheduler.states.num_stored == 2, "the prompt's, and of the answer's the last ones only"
    assert client.num_cached([*turn, 11, 11]) == 2 * INTERVAL
    assert client.num_cached([*turn, 11, 11]) == len(turn) // 4 * 4


def test_states_used_least_recently_make_room() -> None:
    client = Client(1)
    assert [client.num_cached(SYSTEM) for _ in range(2)] == [0, 8]
    assert client.num_cached([20] * 9) == 0
    assert client.num_cached(SYSTEM) == 0


def test_nothing_is_found_without_rows_for_states() -> None:
    client = Client(0)
    assert [client.num_cached(SYSTEM) for _ in range(2)] == [0, 0]
