"""A checkpoint folder: which checkpoints must stay, which are to be removed, which have been saved or removed, and which could not be written."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.checkpoint.files import DamagedCheckpoint, is_entry
from engine.checkpoint.manifest import SHARED
from engine.checkpoint.storage import Storage
from engine.checkpoint.storage_paths import split_path
from engine.distributed import failures
from engine.distributed.agreement import Agreement
from engine.distributed.group import Group
from engine.utils.log import logger


@dataclass(eq=False)
class CheckpointFolder:
    """A checkpoint folder and what this job knows of it; a :class:`engine.checkpoint.writer.CheckpointWriter` writes into it.

    Only the main process removes checkpoints and records events; :attr:`lost` and the errors are the same on all ranks.
    """

    group: Group
    """The job's ranks."""
    storage: Storage
    """The storage of the folder."""
    agreement: Agreement | None = None
    """Told of each of the :attr:`events` as news, perhaps by the writing thread; ``None``: no events are recorded."""
    max_failures: int = 1
    """The number of consecutive failed asynchronous saves that is an error; fewer are only logged."""
    lost: set[str] = field(default_factory=set)
    """Names of checkpoints that could not be written."""
    protected: set[str] = field(default_factory=set)
    """Names of checkpoints that are never removed: the one from which this run resumed, and damaged ones that were skipped then."""
    to_remove: list[str] = field(default_factory=list)
    """Names of checkpoints whose removal is pending."""
    events: deque[tuple[str, str]] = field(default_factory=deque)
    """On the main process, ``"saved"`` or ``"removed"`` and a checkpoint's name, in order; the reader takes them out."""
    _failures: int = 0
    _error: RuntimeError | None = None
    _in_the_way: set[str] = field(default_factory=set)
    """Names that a warning has named because what has them must stay."""
    _stuck: set[str] = field(default_factory=set)
    _swept: bool = False

    # -- names ----------------------------------------------------------------------------------------------------------------------------

    def free_name(self, name: str) -> str:
        """Return ``name``, numbered if what has this name must stay: it is being read, resumed from, unreadable, pending removal, or a file.

        A number is new: the checkpoint that has the previous one may be kept.
        """
        free, number, stem = name, 0, name.removesuffix(".ckpt")
        while (
            free in self.protected
            or free in self.to_remove
            or self.storage.must_stay(free)
            or (number and self.storage.has(free))
        ):
            number += 1
            free = f"{stem}-v{number}{name[len(stem) :]}"
        if number and name not in self._in_the_way:
            self._in_the_way.add(name)
            logger.warning(
                "%s must stay: it is in use, cannot be read, or is not a checkpoint; the new checkpoint is saved as %s",
                self.storage.path(name),
                free,
            )
        return free

    # -- retention ------------------------------------------------------------------------------------------------------------------------

    def take_over(self, to_remove: Any, path: Path | str) -> None:
        """Take over the pending removals (:attr:`to_remove`) that the checkpoint at ``path``, from which this job resumes, has saved.

        Only names of older checkpoints in this same folder count: a newer checkpoint, or one elsewhere, of the same name is another one.

        Raises:
            DamagedCheckpoint: ``to_remove`` is not a list of names.
        """
        if not isinstance(to_remove, list) or not all(map(is_entry, to_remove)):
            raise DamagedCheckpoint(f"{path}: {SHARED}.json has no usable 'postponed': {to_remove!r:.100}")
        storage, name = split_path(path)
        if self.group.is_main and storage.is_same(self.storage):
            self.storage.sweep()  # now, since this job may never save
            names = list(self.storage.manifests()) if to_remove else []
            self.to_remove = (
                [older for older in names[: names.index(name)] if older in to_remove] if name in names else []
            )

    def sweep(self) -> None:
        """Delete what killed runs have left, once per job. Only the main process calls this."""
        if not self._swept:
            self._swept = True
            self.storage.sweep()

    def remove_later(self, names: Sequence[str]) -> None:
        """Delete these checkpoints (on the main process) once the one in progress is complete."""
        if self.group.is_main:
            self.to_remove += names

    def remove(self, names: Sequence[str] = ()) -> None:
        """Delete ``names`` and the checkpoints in :attr:`to_remove` (on the main process). Those that are in use, or cannot be deleted,
        are tried again later."""
        if self.group.is_main and (names or self.to_remove):
            pending, self.to_remove = [*self.to_remove, *names], []
            self.to_remove += [
                name for name in dict.fromkeys(pending) if name in self.protected or not self._remove(name)
            ]

    def _remove(self, name: str) -> bool:
        """Try to delete a checkpoint; False: try again later."""
        try:
            gone = self.storage.remove(name)
        except Exception as error:  # of any kind (remote storages have their own): the save in progress must go on
            gives_up = isinstance(error, ValueError)
            retry = "" if gives_up else " (tried again after each save)"
            if name not in self._stuck:
                logger.warning("checkpoint %s could not be removed: %s: %s%s", name, type(error).__name__, error, retry)
            self._stuck.add(name)
            return gives_up
        self._stuck.discard(name)
        if gone:
            self.add_event("removed", name)
        return gone

    # -- events and failures --------------------------------------------------------------------------------------------------------------

    def add_event(self, event: str, name: str) -> None:
        """Add to :attr:`events`, if there is an agreement to notify."""
        if self.agreement is not None:
            self.events.append((event, name))
            self.agreement.notify()

    def ended(self, name: str, error: BaseException | None) -> None:
        """Record how the save of a checkpoint has ended. An error is logged, or after too many in a row kept for :meth:`raise_error`."""
        if error is None:
            self._failures = 0
            return
        self._failures += 1
        self.lost.add(name)
        message = f"checkpoint {name} was not written: {failures.end_of_message(error)}"
        if self._failures >= self.max_failures:
            self._error = RuntimeError(
                f"{message} ({self._failures} failure(s) in a row). Earlier checkpoints are unchanged"
            )
            self._error.__cause__ = error
        elif self.group.is_main:
            logger.error(
                "%s; training continues (failure %d in a row, %d are an error)",
                message,
                self._failures,
                self.max_failures,
            )

    def log_error(self) -> None:
        """Log the error that :meth:`ended` has kept, in case nobody calls :meth:`raise_error`."""
        if self._error is not None and self.group.is_main:
            logger.error("%s", self._error)

    def raise_error(self) -> None:
        """Raise the error that :meth:`ended` has kept, once.

        Raises:
            RuntimeError: the latest :attr:`max_failures` checkpoints could not be written.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
