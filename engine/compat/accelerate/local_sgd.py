"""``LocalSGD``: on one process, where there is nothing to average."""

from __future__ import annotations

from typing import Any, Self

from engine.compat.accelerate.names import FUNCTIONS


class LocalSGD:
    """A block whose :meth:`step` would average the ``model`` of all processes now and then; on one process it does nothing.

    Raises:
        NotImplementedError: there are several processes, and it is ``enabled``.
    """

    refused = f"on several processes it is an error: {FUNCTIONS['LocalSGD']}"
    """What to do instead; for ``fit migrate``, which reports each use."""

    def __init__(self, accelerator: Any, model: Any, local_sgd_steps: int, enabled: bool = True) -> None:
        if enabled and accelerator.num_processes > 1:
            raise NotImplementedError(
                f"LocalSGD has no counterpart on {accelerator.num_processes} processes: {FUNCTIONS['LocalSGD']}"
            )
        self.enabled, self.num_steps = False, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End the block."""

    def step(self) -> None:
        """Count a step."""
        self.num_steps += 1
