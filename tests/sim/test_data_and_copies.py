"""Batches and copies for checkpoints on the simulated device."""

from __future__ import annotations

from scenario import play, scenarios


@scenarios("batches")
def test_batches(scenario: str) -> None:
    play("batches", scenario)


@scenarios("staging")
def test_staging(scenario: str) -> None:
    play("staging", scenario)
