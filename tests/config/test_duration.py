"""Durations: every accepted form, every refused one, and when a trigger is due."""

from __future__ import annotations

from datetime import timedelta

import pytest

from engine.config.duration import NEVER, Duration, Every, parse


@pytest.mark.parametrize(
    ("given", "unit", "value"),
    [
        ("3 epochs", "epochs", 3),
        ("1 epoch", "epochs", 1),
        ("0.5 epochs", "epochs", 0.5),
        ("500 steps", "steps", 500),
        ("1_000steps", "steps", 1000),
        (7, "steps", 7),
        ("7", "steps", 7),
        (0.25, "epochs", 0.25),
        ("0.25", "epochs", 0.25),
        (1.0, "epochs", 1),
        ("30 s", "seconds", 30),
        ("10 min", "seconds", 600),
        (" 1.5 H ", "seconds", 5400),
        ("2 days", "seconds", 172800),
        ("01:02:03:04", "seconds", 86400 + 2 * 3600 + 3 * 60 + 4),
        (timedelta(minutes=1, milliseconds=500), "seconds", 60.5),
        (Duration("steps", 3), "steps", 3),
    ],
)
def test_accepted_forms(given: object, unit: str, value: float) -> None:
    found = parse(given)
    assert (found.unit, found.value) == (unit, value)
    assert isinstance(found.value, int) == (value == int(value))


def test_none_stays_none() -> None:
    assert parse(None) is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("3 stpes", ValueError, "did you mean 'steps'"),
        ("soon", ValueError, "'3 epochs'"),
        ("", ValueError, "'3 epochs'"),
        ("-1 steps", ValueError, "not a duration"),
        (-1, ValueError, "from 0"),
        (1 << 63, ValueError, "a number from 0 to"),
        ("9" * 400 + " s", ValueError, "from 0 to 3153600000"),
        ("99999999999999:00:00:00", ValueError, "from 0 to 3153600000"),
        ("1.5 steps", ValueError, "no fraction of a step"),
        (2.5, ValueError, "no unit"),
        (float("nan"), ValueError, "no unit"),
        (timedelta(seconds=-1), ValueError, "from 0"),
        (True, TypeError, "bool"),
        ([1], TypeError, "list"),
    ],
)
def test_refused_forms(given: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse(given)


def test_text_of_a_duration_is_a_form_of_it() -> None:
    for text in ("3 epochs", "0.5 epochs", "500 steps", "90 seconds"):
        assert str(parse(text)) == text


def due_steps(every: Every, steps: int) -> list[int]:
    return [step for step in range(steps + 1) if every.due(step, None, 0.0)]


def test_steps() -> None:
    assert due_steps(Every("4 steps"), 12) == [4, 8, 12]


def test_once_in_a_step() -> None:
    every = Every(2)
    assert [every.due(2, None, 0.0), every.due(2, 1, 0.0), every.due(4, None, 0.0)] == [True, False, True]


def test_whole_epochs() -> None:
    every = Every("2 epochs")
    assert [every.due(step, end, 0.0) for step, end in ((5, None), (10, 1), (15, None), (20, 2), (30, 3), (40, 4))] == [
        *(False, False, False, True, False, True)
    ]


def test_fractions_of_an_epoch_come_at_the_first_step_that_reaches_them() -> None:
    # Epochs of 5 steps: halves at 2.5, 5, 7.5, 10 steps.
    assert due_steps(Every("0.5 epochs", steps_per_epoch=5), 10) == [3, 5, 8, 10]
    # 0.1 as a float is a little more than 1/10; the ends of tenths of 30 steps are still multiples of 3.
    assert due_steps(Every("0.1 epochs", steps_per_epoch=30), 30) == list(range(3, 31, 3))


def test_fractions_need_the_length_of_an_epoch() -> None:
    with pytest.raises(ValueError, match="length of an epoch"):
        Every("0.5 epochs").due(1, None, 0.0)


def test_seconds() -> None:
    every = Every("10 s")
    assert [every.due(step, None, now) for step, now in enumerate((1.0, 9.9, 25.0, 34.0, 35.0))] == [
        False,
        False,
        True,
        False,
        True,
    ]
    # The clock of a resumed run began again.
    assert [every.due(step, None, now) for step, now in ((5, 1.0), (6, 10.0))] == [False, True]


@pytest.mark.parametrize(
    ("duration", "next_steps"),
    [
        ("4 steps", [4, 4, 4, 4, 8, 8, 8, 8, 12]),
        ("10 s", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("0.4 epochs", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("1 epoch", [NEVER] * 9),
        (None, [NEVER] * 9),
    ],
)
def test_until_the_next_step_nobody_needs_to_ask(duration: str | None, next_steps: list[int]) -> None:
    assert [Every(duration).next_step(step) for step in range(9)] == next_steps


def test_a_multiple_that_was_not_asked_for_is_due_at_the_next_step() -> None:
    every = Every(4)
    every.start(7)
    assert every.next_step(7) == 8
    assert every.next_step(8) == 9  # nobody asked at 8
    assert every.due(9, None, 0.0)
    assert every.next_step(9) == 12


def test_never() -> None:
    assert not any(Every(None).due(step, step, 1e9) for step in range(5))


def test_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        Every("0 steps")


def test_state() -> None:
    first, second = Every(2), Every(2)
    assert first.due(2, None, 1.0)
    second.load_state_dict(first.state_dict())
    assert not second.due(2, None, 1.0)


@pytest.mark.parametrize(
    ("given", "unit", "value"),
    [
        ("2e9 tokens", "tokens", 2_000_000_000),
        ("524_288 tokens", "tokens", 524_288),
        ("1 token", "tokens", 1),
        ("5E8tok", "tokens", 500_000_000),
        ("1e6 samples", "samples", 1_000_000),
        ("1.5e3 sample", "samples", 1500),
        ("9007199254740993 tokens", "tokens", 9007199254740993),
        ("1e3 steps", "steps", 1000),
        ("5e-1 epochs", "epochs", 0.5),
        ("1e1 min", "seconds", 600),
        (Duration("tokens", 5.0), "tokens", 5),
    ],
)
def test_samples_and_tokens(given: object, unit: str, value: float) -> None:
    test_accepted_forms(given, unit, value)
    assert parse(str(parse(given))) == parse(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("1.5 tokens", "1.5 tokens: there is no fraction of a token"),
        ("1e-1 samples", "0.1 samples: there is no fraction of a sample"),
        ("1e999 tokens", "a duration is a number from 0 to"),
        ("2e9", "has no unit"),
        ("e9 tokens", "not a duration"),
        ("3 toknes", "did you mean 'tokens'"),
        ("-2 tokens", "not a duration"),
    ],
)
def test_refused_samples_and_tokens(given: str, message: str) -> None:
    test_refused_forms(given, ValueError, message)
