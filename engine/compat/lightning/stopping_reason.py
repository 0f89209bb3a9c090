"""The reason for which Lightning's ``EarlyStopping`` has stopped a training, as an enum."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import engine.callbacks as own


class EarlyStoppingReason(Enum):
    """The reasons of ``EarlyStopping``."""

    NOT_STOPPED, STOPPING_THRESHOLD, DIVERGENCE_THRESHOLD, PATIENCE_EXHAUSTED, NON_FINITE_METRIC = range(5)


class NamesReason:
    """Gives ``EarlyStopping`` the attribute ``stopping_reason``, and the text of it."""

    stopping_reason = EarlyStoppingReason.NOT_STOPPED
    stopping_reason_message: str | None = None

    def _reason_to_stop(self: Any, value: float) -> str | None:
        text: str | None = super()._reason_to_stop(value)  # type: ignore[misc]
        if text is not None:
            self.stopping_reason, self.stopping_reason_message = _reason(self, value), text
        return text

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return {
            **state,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)  # type: ignore[misc]
        self.stopping_reason = EarlyStoppingReason(state.get("stopping_reason", 0))
        self.stopping_reason_message = state.get("stopping_reason_message")


def _reason(callback: own.EarlyStopping, value: float) -> EarlyStoppingReason:
    """The rule by which ``callback`` stops at ``value``, in the order in which it applies them."""
    if callback.check_finite and not math.isfinite(value):
        return EarlyStoppingReason.NON_FINITE_METRIC
    if callback.stopping_threshold is not None and callback._is_better(value, callback.stopping_threshold):
        return EarlyStoppingReason.STOPPING_THRESHOLD
    if callback.divergence_threshold is not None and callback._is_better(callback.divergence_threshold, value):
        return EarlyStoppingReason.DIVERGENCE_THRESHOLD
    return EarlyStoppingReason.PATIENCE_EXHAUSTED
