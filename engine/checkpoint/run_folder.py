"""Which folder a run has: a new one, or that of the run that it goes on from."""

from __future__ import annotations

import errno
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from engine.checkpoint.resume import NAMES, Resume
from engine.checkpoint.run_json import ENDED, Mark, in_use, new_mark
from engine.checkpoint.run_locks import Held, Runs, has_checkpoints, plain, runs
from engine.checkpoint.storage import Place, place
from engine.checkpoint.user_paths import folder
from engine.distributed.all_or_none import together
from engine.distributed.group import Group
from engine.utils.errors import FolderInUse
from engine.utils.log import logger

EVALUATIONS = ("validate", "test", "predict")


class Trained(NamedTuple):
    """What a ``Fit`` keeps of its newest training: its ``id``, and where its checkpoints are."""

    id: str
    checkpoints: str


class RunFolder:
    """The folder of one run. Rank 0 chooses and holds it, all ranks know it; all of them make this object, and call its methods, together.

    A new training gets a folder that no run has used. One that goes on from ``"last"``, ``"best"`` or ``"auto"`` has the folder of the run
    that saved: the one that this job began, if its processes were restarted, else the newest that has checkpoints. One that goes on from a
    path has the folder in which the checkpoint lies, if it is a run's of the same ``root_dir``, else a new one. An evaluation writes into
    the folder of the training that the same :class:`engine.Fit` has made, or into a new one.

    Args:
        root_dir: what runs share.
        kept: where else checkpoints are kept (a directory or a URL); ``None``: in the run's folder.
        stage: as of :class:`engine.Run`.
        wanted: what the run goes on from, or whose weights it takes.
        earlier: the training before, when the same ``Fit`` has made one: names mean its checkpoints.

    Raises:
        FolderInUse: another process is at the run that is to go on.
    """

    def __init__(
        self,
        group: Group,
        root_dir: Path,
        kept: str | Path | None,
        stage: str,
        wanted: str | Path | Resume | None,
        earlier: Trained | None,
    ) -> None:
        how = wanted if isinstance(wanted, Resume) or wanted is None else Resume(wanted)
        self._group, self._stage, self._earlier = group, stage, earlier
        self._kept = None if kept is None else str(kept)
        self._wanted = None if how is None else str(how.path)
        self._goes_on = how is not None and stage == "fit" and not how.weights_only
        self._root, self._held = runs(root_dir, "checkpoints"), dict[str, Held]()
        self._news: list[Any] | None = None
        row = self._on_main(self._choose)
        self.id: str = row["id"]
        """Of the run; the same after it was resumed."""
        self.path, self._news = Path(row["path"]), row["news"]
        self.checkpoints: str = row["checkpoints"]
        """Where they are kept; in an evaluation, where they are read."""
        self.named: str = row["named"]
        """Where the names ``"last"``, ``"best"`` and ``"auto"`` are looked for."""

    def announce(self) -> None:
        """Say once where the run is: something is going to be written there."""
        if self._news and self._group.is_main:
            logger.log(*self._news)
        self._news = None

    def keep(self, root: str | Path | None) -> str:
        """Where this run's checkpoints are that are to be kept in ``root``; ``None``: in its folder.

        Raises:
            PermissionError: a training could not write there.
        """
        if self._stage == "fit":
            self.announce()
        if root is not None and str(root) != self._kept:
            self.checkpoints = self.named = self._on_main(partial(self._keep, runs(root)))
            self._kept = str(root)
        where = str(self.path / "checkpoints") if root is None and self._stage == "fit" else self.checkpoints
        if self._stage == "fit":
            self._on_main(partial(_check_writable, where))
        return where

    def source(self, wanted: str) -> tuple[Place, str]:
        """A place, and the name or path of a checkpoint, from what a user gave: a name, a checkpoint's path, or the path of a run's folder."""
        inner = None if wanted in NAMES else self._on_main(partial(_inner, wanted))
        return (place(self.named), wanted) if inner is None else (place(inner), "last")

    def trained(self) -> Trained:
        """What is to be known of this run after its end."""
        return Trained(self.id, self.checkpoints)

    def close(self, failed: bool = False) -> None:
        """The run is over: another one may use the folder."""
        while self._held:
            self._held.popitem()[1].close(failed, wrote=self._news is None)

    # -- on rank 0 --------------------------------------------------------------------------------------------------------------

    def _on_main(self, work: Callable[[], Any]) -> Any:
        return together(self._group, lambda: work() if self._group.is_main else None)[0]

    def _choose(self) -> dict[str, Any]:
        try:
            return self._training() if self._stage == "fit" else self._evaluation()
        except BaseException:
            self.close(failed=True)
            raise

    def _training(self) -> dict[str, Any]:
        first = self._root if self._kept is None else runs(self._kept)
        wanted = self._going_on(first)
        number, mark = self._get(first, wanted, uuid.uuid4().hex)
        named = self._named(first) if wanted is None and self._wanted in NAMES else first.place(number)
        own = number if first is self._root else self._get(self._root, self._root.with_id(mark["id"]), mark["id"])[0]
        where = self._root.folder(own) if first is self._root else f"{self._root.folder(own)}, its checkpoints into {first.folder(number)}"
        news: list[Any] = [logging.INFO, "this run writes into %s", where]
        if wanted is None and (number or own):
            news = [
                logging.WARNING,
                "%s has another run: this one writes into %s",
                first.folder(0) if number else self._root.folder(0),
                where,
            ]
        return self._row(mark["id"], own, first.place(number), named, news)

    def _evaluation(self) -> dict[str, Any]:
        named = self._named(self._root if self._kept is None else runs(self._kept))
        own = None if self._earlier is None else self._root.with_id(self._earlier.id)
        try:
            number, mark = self._get(self._root, own, uuid.uuid4().hex)
        except FolderInUse:
            number, mark = self._get(self._root, None, uuid.uuid4().hex)
        news = [logging.INFO, "what is logged goes into %s", self._root.folder(number)]
        return self._row(mark["id"], number, named, named, news)

    def _row(self, name: str, number: int, checkpoints: Place, named: Place, news: list[Any]) -> dict[str, Any]:
        return {"id": name, "path": self._root.folder(number), "checkpoints": checkpoints.root, "named": named.root, "news": news}

    def _keep(self, root: Runs) -> str:
        if self._stage != "fit":
            return self._named(root).root
        number = root.with_id(self.id)
        return root.place(self._get(root, self._going_on(root) if number is None else number, self.id)[0]).root

    def _get(self, root: Runs, number: int | None, name: str) -> tuple[int, Mark]:
        """Hold the run of that number, or a new one (``None``) of that name. What this run holds already (``dirpath`` may be ``root_dir``) it has."""
        if number is not None and (held := self._held.get(plain(root.folder(number)))) is not None:
            return number, held.mark
        mark = new_mark(name, self._stage, _job(os.environ))
        try:
            number, held = root.claim(mark) if number is None else (number, root.hold(number, mark))
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            # Nothing can be overwritten where nothing can be written; whether anything has to be is for callbacks to say.
            return root.unused() if number is None else number, mark
        self._held[plain(root.folder(number))] = held
        return number, held.mark

    def _going_on(self, root: Runs) -> int | None:
        """The run to go on with; ``None``: a new one begins.

        Raises:
            FolderInUse: the newest one has saved nothing yet and is at work.
        """
        if not self._goes_on or self._wanted is None:
            return None
        if self._wanted not in NAMES:
            return root.of(_inner(self._wanted) or self._wanted)
        candidates = self._candidates(root)
        for number in candidates:
            if has_checkpoints(root.place(number)):
                return number
            if (mark := root.holder(number)) is not None:
                raise FolderInUse(in_use(root.folder(number), mark))
        if self._wanted != "auto":
            return None
        # One that was cut short before it had saved anything begins again, in its folder.
        own = _own(os.environ)
        return next((n for n in candidates if (mark := root.mark(n)).get("status") != ENDED or _of(mark, own)), None)

    def _named(self, root: Runs) -> Place:
        """Where the names are looked for when the run does not go on from there."""
        return _newest(root) if self._earlier is None else place(self._earlier.checkpoints)

    def _candidates(self, root: Runs) -> list[int]:
        """The trainings that names may mean, the likeliest first."""
        if self._earlier is not None:
            number = root.with_id(self._earlier.id)
            return [] if number is None else [number]
        return _trainings(root)


def source_of(root_dir: Path, kept: str | Path | None, wanted: str) -> tuple[Place, str]:
    """As :meth:`RunFolder.source`, for one process alone that makes no run."""
    inner = None if wanted in NAMES else _inner(wanted)
    if inner is not None:
        return place(inner), "last"
    return _newest(runs(root_dir, "checkpoints") if kept is None else runs(kept)), wanted


def _newest(root: Runs) -> Place:
    """Where the checkpoints of the newest training are that has any."""
    return root.place(next((n for n in _trainings(root) if has_checkpoints(root.place(n))), 0))


def _trainings(root: Runs) -> list[int]:
    """The trainings that names may mean, the likeliest first."""
    marks = {number: root.mark(number) for number in root.newest_first()}
    trainings = [number for number, mark in marks.items() if mark.get("stage") not in EVALUATIONS]
    own = [number for number in trainings if _of(marks[number], _own(os.environ))]
    return own if own and _restarted(os.environ) else [*own, *(number for number in trainings if number not in own)]


def _check_writable(where: str) -> None:
    """Find out before the first step what the first save would find; at a URL only that can."""
    if "://" in where:
        return
    there = next(each for each in (Path(where), *Path(where).parents) if os.path.exists(each))
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        why = "is on a read-only file system" if os.statvfs(there).f_flag & os.ST_RDONLY else "may not be written to by this user"
        raise PermissionError(
            f"checkpoints are to be kept in {where}, and {there} {why}: choose another root_dir, or another dirpath of ModelCheckpoint"
        )


def _inner(wanted: str) -> str | None:
    """The place of the checkpoints in a run's folder; ``None``: it is none."""
    found = folder(wanted)
    return None if found is None else found.root


# -- the job: what stays the same when a launcher or a scheduler starts the processes again ------------------------------------------


def _job(environ: Mapping[str, str]) -> list[str]:
    """The names of the job that these processes belong to."""
    elastic, slurm = environ.get("TORCHELASTIC_RUN_ID", "none"), environ.get("SLURM_JOB_ID")
    names = [] if elastic in ("", "none", "fit") else [f"torchelastic {elastic}"]  # torchrun's and fit's name for jobs that were given none
    return [*names, f"slurm {slurm}"] if slurm else names


def _own(environ: Mapping[str, str]) -> list[str]:
    """Those names by which a run is known as this job's. An allocation of SLURM may have many runs, one that was requeued has one."""
    return [name for name in _job(environ) if not name.startswith("slurm") or _restarted(environ)]


def _restarted(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name, "0") not in ("", "0") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))


def _of(mark: Mark, names: list[str]) -> bool:
    job = mark.get("job")
    return isinstance(job, list) and any(name in job for name in names)
