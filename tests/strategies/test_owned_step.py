"""The optimizer step of a strategy that owns it."""

from __future__ import annotations

from typing import Any

import pytest
from support.internals import new_window
from torch import Tensor

from engine import Single
from engine.strategies.owned_step import OwnedStepper


class Alone:
    world_size, rank = 1, 0


class Never:
    """A guard that is never asked."""

    def check(self, norm: Tensor) -> Any:
        raise AssertionError

    def left_out(self) -> None:
        raise AssertionError


def test_a_strategy_that_owns_the_step_takes_no_guard() -> None:
    strategy = Single()
    strategy.connect(Alone())  # type: ignore[arg-type]
    stepper = OwnedStepper(new_window(), strategy, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Single steps by itself"):
        stepper.guard_by(Never())
