"""The stages of a training that have begun: of ``global_batch_size``, of the lengths of rows, and of a mixture's weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BegunStage:
    """A stage that has begun in a training, or in which a resumed training continues."""

    step: int
    """The number of optimizer steps before its first one; where a training resumes within a stage, those before the resume."""
    kind: str
    """``"batch size"``, ``"row length"`` or ``"mixture"``."""
    text: str
    """The value from here on: ``"512"``, ``"524288 tokens"``, ``"web 40 %, code 60 %"``."""


class StageLog:
    """Collects the stages of a run as they begin. The first stages of a training are not among them: they begin with it."""

    def __init__(self) -> None:
        self.begun: list[BegunStage] = []
        """The stages that have begun in this run, in the order of their steps."""
        self._latest: dict[str, str] = {}

    def note(self, kind: str, text: str, step: int, first: bool = False) -> None:
        """Take note that the next step belongs to this stage. ``first``: whether the training begins with the stage."""
        if self._latest.get(kind) != text:
            self._latest[kind] = text
            if not first:
                self.begun.append(BegunStage(step, kind, text))
