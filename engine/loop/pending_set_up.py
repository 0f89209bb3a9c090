"""A set-up that a hook may need before its time."""

from __future__ import annotations


class PendingSetUp:
    """The set-up of a training while the hooks that come before it are called: :class:`engine.loop.setup.TrainingSetUp`."""

    def complete(self) -> None:
        """Set up the training now, unless it is done."""
        raise NotImplementedError
