"""The library on the simulated accelerator, one rank and two."""

from __future__ import annotations

from scenario import play, scenarios


@scenarios("one_rank")
def test_one_rank(scenario: str) -> None:
    play("one_rank", scenario)


@scenarios("two_ranks")
def test_two_ranks(scenario: str) -> None:
    play("two_ranks", scenario, world_size=2)
