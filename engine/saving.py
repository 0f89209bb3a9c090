"""Where a run's checkpoints go: one directory a step, written by all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.checkpoint import store
from engine.distributed.collectives import gather_object
from engine.distributed.group import Group


class Saver:
    """Saves under ``root`` as ``step=00000120``; knows which steps it has saved."""

    def __init__(self, group: Group, root: Path) -> None:
        self.group, self.root = group, root
        self._saved: tuple[int, int, int] | None = None

    def save(
        self, step: int, *, model: dict[str, Tensor], optim: Any, shared: Any, own: Any, manifest: dict[str, Any]
    ) -> Path:
        """Write the checkpoint of a step; a collective.

        Args:
            model: parameters and buffers by name, the same on all ranks.
            optim, shared: trees that are the same on all ranks.
            own: this rank's tree.
            manifest: readable facts about it.
        """
        path = self.root / f"step={step:08d}"
        state = shared["state"]
        done = state["epoch_done"]  # the end of an epoch and the start of the next are one place
        key = (step, state["epoch"] + done, 0 if done else state["whole_batches"])
        inside = state["batch_idx"] != state["whole_batches"]  # a window: the state at its start is what counts
        if path.exists() and (key == self._saved or (inside and self._saved is not None and self._saved[0] == step)):
            return path
        store.write(
            path,
            model=model,
            optim=optim,
            shared_state=shared,
            rank_state=own,
            rank=self.group.rank,
            world_size=self.group.world_size,
            manifest=manifest,
            agree=self._agree,
        )
        self._saved = key
        return path

    def load(self, path: Path) -> store.Loaded:
        """Read a checkpoint, verified."""
        return store.read(path, self.group.rank, self.group.world_size)

    def find(self, resume: str | Path) -> Path:
        """The checkpoint that ``resume`` means: ``"last"`` (the newest complete one), or a path.

        Raises:
            FileNotFoundError: there is none.
        """
        if str(resume) == "last":
            found = store.latest(self.root)
            if found is None:
                raise FileNotFoundError(f"resume='last': no complete checkpoint in {self.root}")
            return found
        return Path(resume)

    def remove(self, path: Path) -> None:
        """Delete a checkpoint (on the main process)."""
        if self.group.is_main:
            store.remove(path)

    @staticmethod
    def readable(values: Mapping[str, Any]) -> dict[str, Any]:
        """What of ``values`` JSON can say; the rest as text."""
        plain = (str, int, float, bool, type(None))
        return {str(k): v if isinstance(v, plain) else repr(v)[:200] for k, v in values.items()}

    def _agree(self, error: Exception | None) -> Exception | None:
        if self.group.world_size == 1:
            return error
        every = gather_object(self.group, None if error is None else (type(error).__name__, str(error)))
        first = next((e for e in every if e is not None), None)
        return error if first is None or error is not None else RuntimeError(f"{first[0]}: {first[1]}")
