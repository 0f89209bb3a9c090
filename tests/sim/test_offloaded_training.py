"""Activation offload on the simulated accelerator, one rank and two. Each scenario is played in processes of its own."""

from __future__ import annotations

from scenario import play, scenarios


@scenarios("offload")
def test_one_rank(scenario: str) -> None:
    play("offload", scenario)


@scenarios("offload_ranks")
def test_two_ranks(scenario: str) -> None:
    play("offload_ranks", scenario, world_size=2)
