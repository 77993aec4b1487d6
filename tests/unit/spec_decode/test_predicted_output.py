"""Following a predicted output."""

from hypothesis import given
from hypothesis import strategies as st

from specray.spec_decode.prediction import Prediction

PREDICTED = [10, 11, 12, 13, 14, 15, 16, 17]

texts = st.lists(st.integers(0, 2), max_size=30)


def after(*output: int) -> list[int]:
    prediction = Prediction(PREDICTED)
    prediction.advance(output)
    return prediction.next_tokens(3)


def test_a_prediction_is_followed_from_its_start() -> None:
    assert after() == [10, 11, 12]
    assert after(10, 11) == [12, 13, 14]
    assert after(*PREDICTED[:6]) == [16, 17]
    assert after(*PREDICTED) == []


def test_an_output_that_left_the_prediction_returns_with_two_equal_tokens() -> None:
    assert after(10, 11, 99) == []
    assert after(10, 11, 99, 13) == []
    assert after(10, 11, 99, 13, 14) == [15, 16, 17]
    assert after(99, 16, 17) == []
    assert after(99, 10, 11) == [12, 13, 14]


def test_of_several_places_the_next_one_is_taken() -> None:
    prediction = Prediction([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 5])
    prediction.advance([1, 2, 3, 7, 1, 2])
    assert prediction.next_tokens(1) == [4]
    prediction.advance([4, 9, 1, 2, 7, 7, 1, 2])  # past the last place: the last one is taken
    assert prediction.next_tokens(1) == [5]


@given(texts, texts)
def test_what_is_expected_follows_the_end_of_the_output_in_the_prediction(
    predicted: list[int], output: list[int]
) -> None:
    prediction = Prediction(predicted)
    prediction.advance(output)
    expected = prediction.next_tokens(len(predicted))
    if not expected:
        return
    place = len(predicted) - len(expected)
    assert predicted[place:] == expected
    assert output == predicted[:place] or output[-2:] == predicted[place - 2 : place]


@given(texts, texts, st.integers(0, 30))
def test_the_steps_in_which_tokens_arrive_do_not_matter(predicted: list[int], output: list[int], cut: int) -> None:
    at_once, in_two = Prediction(predicted), Prediction(predicted)
    at_once.advance(output)
    in_two.advance(output[:cut])
    in_two.advance(output[cut:])
    assert (at_once.next_tokens(9), at_once.num_followed) == (in_two.next_tokens(9), in_two.num_followed)
