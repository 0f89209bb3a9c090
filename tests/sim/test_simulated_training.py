"""The library on the simulated accelerator, one rank and two."""

from __future__ import annotations

import pytest
from scenario import play, scenarios

BROKEN = {
    "asynchronous_saves_under_fp16_do_not_wait": (
        "engine/prepared/snapshot.py, shared: the loss scaler's state_dict reads its scale on the host in the step of a save"
    ),
}
"""What the library does not do yet; remove the line with the mend."""


@pytest.fixture(autouse=True)
def broken(request: pytest.FixtureRequest, scenario: str) -> None:
    if scenario in BROKEN:
        request.applymarker(pytest.mark.xfail(reason=BROKEN[scenario], strict=True, raises=AssertionError))


@scenarios("one_rank")
def test_one_rank(scenario: str) -> None:
    play("one_rank", scenario)


@scenarios("two_ranks")
def test_two_ranks(scenario: str) -> None:
    play("two_ranks", scenario, world_size=2)
