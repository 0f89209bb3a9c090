"""Batches and copies for checkpoints on the simulated device."""

from __future__ import annotations

from scenario import play, scenarios


@scenarios("batches")
def test_batches(scenario: str) -> None:
    play("batches", scenario)


@scenarios("host_copies")
def test_host_copies(scenario: str) -> None:
    play("host_copies", scenario)
