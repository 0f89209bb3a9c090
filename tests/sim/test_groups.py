"""What a machine with one device, and a pipeline of two, must not leave untried. Each scenario is played in processes of its own."""

from __future__ import annotations

from scenario import play, scenarios


@scenarios("group_of_one")
def test_a_group_of_one(scenario: str) -> None:
    play("group_of_one", scenario)


@scenarios("pipelines")
def test_a_pipeline_of_two_ranks(scenario: str) -> None:
    play("pipelines", scenario, 2)
