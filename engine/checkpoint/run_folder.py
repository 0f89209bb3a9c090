"""The choice of a run's folder: a new one, or that of the run that it continues."""

from __future__ import annotations

import errno
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from engine.checkpoint.catalog import folder_at
from engine.checkpoint.resume import NAMES, Resume
from engine.checkpoint.runs import ENDED, Claim, RunRecord, RunRoot, canonical, run_root_of
from engine.checkpoint.storage import Storage
from engine.checkpoint.storage_paths import storage_of
from engine.distributed.collectives import all_or_none
from engine.distributed.group import Group
from engine.utils.errors import FolderInUse
from engine.utils.log import logger

EVALUATIONS = ("validate", "test", "predict")


class Trained(NamedTuple):
    """A ``Fit``'s latest training: the ``id`` of its run, its checkpoint folder, and its name, if it has one."""

    id: str
    checkpoints: str
    name: str = ""


class RunFolder:
    """The folder of one run. Rank 0 chooses and locks it and tells the other ranks; all ranks create this object and call its methods together.

    A new training gets a folder that no run has used. A training that resumes from ``"last"``, ``"best"`` or ``"auto"`` gets the folder of the
    run that it continues: the run that this job started, if its processes were restarted, else the newest one with checkpoints. A training that
    resumes from a path gets the folder of that checkpoint's run, if the run is in the same ``root_dir``, else a new one. An evaluation writes
    into the folder of the same :class:`engine.Fit`'s training, or into a new one.

    A run with a name is among the runs of that name, wherever they are: in ``root_dir`` and in places for checkpoints. It never continues a run of
    another name. A run without a name that resumes from the path of a named one in ``root_dir`` continues that one.

    Args:
        root_dir: the folder that runs share.
        dirpath: a directory or URL for checkpoints; ``None``: they are kept in the run's folder.
        stage: the run's ``stage``, as in :class:`engine.Run`.
        checkpoint: the checkpoint from which the run resumes, or whose weights it loads.
        earlier: the same ``Fit``'s previous training, if any; then the names mean its checkpoints.
        name: the run's name; empty: none.

    Raises:
        FolderInUse: another process is writing the run to continue.
        ValueError: it is unclear which run of the name is the newest.
    """

    def __init__(
        self,
        group: Group,
        root_dir: Path,
        dirpath: str | Path | None,
        stage: str,
        checkpoint: str | Path | Resume | None,
        earlier: Trained | None,
        name: str = "",
    ) -> None:
        resume = checkpoint if isinstance(checkpoint, Resume) or checkpoint is None else Resume(checkpoint)
        self._group, self._stage, self._earlier = group, stage, earlier
        self._chosen_root = None if dirpath is None else str(dirpath)
        self._checkpoint = None if resume is None else str(resume.path)
        self._continues = resume is not None and stage == "fit" and not resume.weights_only
        self._root_dir, self._name, self._claims = root_dir, name, dict[str, Claim]()
        self._announcement: list[Any] | None = None
        row = self._on_main(self._choose)
        self.id: str = row["id"]
        """The run's id, which stays the same when the run is resumed."""
        self.path, self._announcement = Path(row["path"]), row["announcement"]
        self.checkpoints: str = row["checkpoints"]
        """The checkpoint folder: to write into in a training, to read from in an evaluation."""
        self.named: str = row["named"]
        """The checkpoint folder in which the names ``"last"``, ``"best"`` and ``"auto"`` are looked up."""

    @property
    def is_announced(self) -> bool:
        """Whether :meth:`announce` has logged the run's folder."""
        return self._announcement is None

    def announce(self) -> None:
        """Log the run's folder, once, before anything is written into it."""
        if self._announcement and self._group.is_main:
            logger.log(*self._announcement)
        self._announcement = None

    def choose_root(self, root: str | Path | None) -> str:
        """Choose this run's checkpoint folder under ``root`` (``None``: in the run's folder), and return it.

        Raises:
            PermissionError: a training may not write there.
        """
        if self._stage == "fit":
            self.announce()
        if root is not None and str(root) != self._chosen_root:
            self.checkpoints = self.named = self._on_main(partial(self._lock_root, root))
            self._chosen_root = str(root)
        checkpoint_folder = (
            str(self.path / "checkpoints") if root is None and self._stage == "fit" else self.checkpoints
        )
        if self._stage == "fit":
            self._on_main(partial(_check_writable, checkpoint_folder))
        return checkpoint_folder

    def further_root(self, root: str | Path | None) -> str:
        """Lock this run's folder under a further ``root`` (``None``: the run's folder), and return the checkpoint folder there."""
        if root is None:
            return str(self.path / "checkpoints")
        checkpoint_folder: str = self._on_main(partial(self._lock_root, root))
        if self._stage == "fit":
            self._on_main(partial(_check_writable, checkpoint_folder))
        return checkpoint_folder

    def source(self, checkpoint: str) -> tuple[Storage, str]:
        """Resolve a name, a checkpoint's path or a run's folder to a checkpoint folder and the name or path of a checkpoint."""
        checkpoint_folder = None if checkpoint in NAMES else self._on_main(partial(_checkpoints_in, checkpoint))
        return (
            (storage_of(self.named), checkpoint)
            if checkpoint_folder is None
            else (storage_of(checkpoint_folder), "last")
        )

    def trained(self) -> Trained:
        """The facts about this run that the ``Fit`` remembers after its end."""
        return Trained(self.id, self.checkpoints, self._name)

    def note_beginning(self, checkpoint: str) -> None:
        """Record that this new run began with another run's ``checkpoint``, which a replay from the seed would not. All ranks may call this."""
        for claim in self._claims.values():  # rank 0 has them
            claim.note_beginning(checkpoint)

    def ends_of(self, checkpoints: str) -> list[int] | None:
        """The steps at which trainings of the run with this checkpoint folder have ended by themselves; ``None``: nothing is known of that run."""
        steps: list[int] | None = self._on_main(partial(_ends_of, checkpoints))
        return steps

    def close(self, failed: bool = False, ended_at: int | None = None) -> None:
        """Release the folder at the end of the run. ``ended_at``: the step at which a training has ended by itself."""
        while self._claims:
            self._claims.popitem()[1].close(failed, wrote=self._announcement is None, ended_at=ended_at)

    # -- on rank 0 --------------------------------------------------------------------------------------------------------------

    def _on_main(self, work: Callable[[], Any]) -> Any:
        return all_or_none(self._group, lambda: work() if self._group.is_main else None)[0]

    def _choose(self) -> dict[str, Any]:
        """Choose and lock the folder on rank 0; the result goes to all ranks."""
        self._name = self._name or self._name_to_continue()
        try:
            return self._training() if self._stage == "fit" else self._evaluation()
        except BaseException:
            self.close(failed=True)
            raise

    def _training(self) -> dict[str, Any]:
        """Choose and lock the folders of a training: its run folder and, under another root, its checkpoint folder."""
        run_root, checkpoint_root = self._run_root(), self._checkpoint_root()
        same_root = self._chosen_root is None
        continued = self._run_to_continue(checkpoint_root)
        number, id = self._lock_run(checkpoint_root, continued, uuid.uuid4().hex)
        checkpoints = checkpoint_root.storage(number)
        named = self._named(checkpoint_root) if continued is None and self._checkpoint in NAMES else checkpoints
        own_number = number if same_root else self._lock_run(run_root, run_root.with_id(id), id)[0]
        own_folder = run_root.folder(own_number)
        places = own_folder if same_root else f"{own_folder}, its checkpoints into {checkpoint_root.folder(number)}"
        announcement: list[Any] = [logging.INFO, "this run writes into %s", places]
        root, new_number = (checkpoint_root, number) if number else (run_root, own_number)
        if continued is None and (earlier := root.earlier_run(new_number)) is not None:
            announcement = [
                logging.WARNING,
                "%s belongs to another run: this one writes into %s",
                root.folder(earlier),
                places,
            ]
        return self._row(id, own_folder, checkpoints, named, announcement)

    def _evaluation(self) -> dict[str, Any]:
        """Choose and lock the folder of an evaluation: that of the same ``Fit``'s training if it is free, else a new one."""
        root, named = self._run_root(), self._named(self._checkpoint_root())
        earlier = None if self._earlier is None else root.with_id(self._earlier.id)
        try:
            number, id = self._lock_run(root, earlier, uuid.uuid4().hex)
        except FolderInUse:
            number, id = self._lock_run(root, None, uuid.uuid4().hex)
        folder = root.folder(number)
        announcement = [logging.INFO, "this evaluation writes its logs into %s", folder]
        return self._row(id, folder, named, named, announcement)

    def _run_root(self) -> RunRoot:
        """The runs of this name in ``root_dir``."""
        return run_root_of(self._root_dir, "checkpoints", self._name)

    def _checkpoint_root(self) -> RunRoot:
        """The runs of this name in the place for checkpoints."""
        return self._run_root() if self._chosen_root is None else run_root_of(self._chosen_root, name=self._name)

    def _name_to_continue(self) -> str:
        """The name of the run that a run without a name continues or evaluates; empty: it has none."""
        by_path = self._checkpoint is not None and self._checkpoint not in NAMES
        if self._earlier is not None and not by_path and (self._stage != "fit" or self._continues):
            return self._earlier.name
        if not by_path or not self._continues:
            return ""
        assert self._checkpoint is not None
        root = self._checkpoint_root()
        return root.name_of_run(_checkpoints_in(self._checkpoint) or self._checkpoint)

    def _row(
        self, id: str, folder: str, checkpoints: Storage, named: Storage, announcement: list[Any]
    ) -> dict[str, Any]:
        return {
            "id": id,
            "path": folder,
            "checkpoints": checkpoints.root,
            "named": named.root,
            "announcement": announcement,
        }

    def _lock_root(self, place: str | Path) -> str:
        """Lock this run's folder under another root for checkpoints, and return the checkpoint folder there."""
        root = run_root_of(place, name=self._name)
        if self._stage != "fit":
            return self._named(root).root
        number = root.with_id(self.id)
        if number is None:
            number = self._run_to_continue(root)
        number, _ = self._lock_run(root, number, self.id)
        return root.storage(number).root

    def _lock_run(self, root: RunRoot, number: int | None, id: str) -> tuple[int, str]:
        """Lock the run of this number, or a new one (``None``) with this id, unless it is locked already (``dirpath`` may be ``root_dir``).

        Returns:
            The number and the id of the run.
        """
        if number is not None and (claim := self._claims.get(canonical(root.folder(number)))) is not None:
            return number, claim.record.id
        record = RunRecord.of_this_process(id, self._stage, _job(os.environ))
        try:
            claim = root.claim(record) if number is None else root.hold(number, record)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            # A read-only folder needs no lock: nothing can be overwritten. Callbacks that have to write raise errors.
            return root.unused() if number is None else number, id
        self._claims[canonical(root.folder(claim.number))] = claim
        return claim.number, claim.record.id

    def _run_to_continue(self, root: RunRoot) -> int | None:
        """The number of the run to continue; ``None``: start a new one.

        Raises:
            FolderInUse: the newest run has saved nothing yet and is still running.
        """
        if not self._continues or self._checkpoint is None:
            return None
        if self._checkpoint not in NAMES:
            return root.number_of_run(_checkpoints_in(self._checkpoint) or self._checkpoint)
        candidates = self._candidates(root)
        for number in candidates:
            if root.has_checkpoints(number):
                return number
            if (holder := root.holder(number)) is not None:
                raise holder.in_use(root.folder(number))
        if self._checkpoint != "auto":
            return None
        # A run that was killed before its first save starts again, in the same folder.
        job_names = _restarted_job_names(os.environ)
        return next(
            (n for n in candidates if (record := root.record(n)).status != ENDED or _belongs_to(record, job_names)),
            None,
        )

    def _named(self, root: RunRoot) -> Storage:
        """The checkpoint folder in which names are looked up when the run starts a new folder."""
        return newest_checkpoints(root) if self._earlier is None else storage_of(self._earlier.checkpoints)

    def _candidates(self, root: RunRoot) -> list[int]:
        """The numbers of the trainings that ``"last"``, ``"best"`` or ``"auto"`` may mean, the first choice first."""
        if self._earlier is not None:
            number = root.with_id(self._earlier.id)
            return [] if number is None else [number]
        return _trainings(root)


def source_of(
    root_dir: Path, dirpath: str | Path | None, checkpoint: str, name: str | None = None
) -> tuple[Storage, str]:
    """Do the same as :meth:`RunFolder.source`, in a single process that starts no run."""
    checkpoint_folder = None if checkpoint in NAMES else _checkpoints_in(checkpoint)
    if checkpoint_folder is not None:
        return storage_of(checkpoint_folder), "last"
    root = (
        run_root_of(root_dir, "checkpoints", name or "") if dirpath is None else run_root_of(dirpath, name=name or "")
    )
    return newest_checkpoints(root), checkpoint


def newest_checkpoints(root: RunRoot) -> Storage:
    """The checkpoint folder of the newest training that has checkpoints."""
    return root.storage(next((n for n in _trainings(root) if root.has_checkpoints(n)), 0))


def _ends_of(checkpoints: str) -> list[int] | None:
    """The steps at which the run with this checkpoint folder, which may lie in the run's folder, has ended; ``None``: it has no record."""
    folder, _, name = checkpoints.rpartition("/")
    for place in (checkpoints, *([folder] if name == "checkpoints" and folder else [])):
        if record := run_root_of(place).record(0):
            return list(record.ended_at)
    return None


def _trainings(root: RunRoot) -> list[int]:
    """The numbers of the trainings that ``"last"``, ``"best"`` or ``"auto"`` may mean, the first choice first: those of this job, then the newest.

    Raises:
        ValueError: the root of a name has runs of its own, from a ``root_dir`` of that name, so that the newest run of the name is not certain.
    """
    if root.name and (inner := next(run_root_of(root.folder(0), root.subfolder).newest_first(), 0)):
        folder = root.folder(0)
        raise ValueError(
            f"name={root.name!r} does not say which run to continue: {folder} has runs of its own ({folder}/version_{inner}), written with "
            f"root_dir={folder!r}. Give that root_dir without a name, the path of a run or a checkpoint, or another name"
        )
    records = {number: root.record(number) for number in root.newest_first()}
    trainings = [number for number, record in records.items() if record.stage not in EVALUATIONS]
    of_this_job = [number for number in trainings if _belongs_to(records[number], _restarted_job_names(os.environ))]
    return (
        of_this_job
        if of_this_job and _restarted(os.environ)
        else [*of_this_job, *(number for number in trainings if number not in of_this_job)]
    )


def _check_writable(checkpoint_folder: str) -> None:
    """Check, before the first step, that checkpoints can be written. At a URL only the first save can tell."""
    if "://" in checkpoint_folder:
        return
    ancestor = next(
        path for path in (Path(checkpoint_folder), *Path(checkpoint_folder).parents) if os.path.exists(path)
    )
    if not os.access(ancestor, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        reason = (
            "is on a read-only file system"
            if os.statvfs(ancestor).f_flag & os.ST_RDONLY
            else "may not be written to by this user"
        )
        raise PermissionError(
            f"checkpoints are to be kept in {checkpoint_folder}, and {ancestor} {reason}: choose another root_dir, or another dirpath of "
            "ModelCheckpoint"
        )


def _checkpoints_in(path: str) -> str | None:
    """The checkpoint folder at ``path``, such as a run's folder; ``None``: ``path`` is a checkpoint itself, or has none."""
    storage = folder_at(path)
    return None if storage is None else storage.root


# -- the job, which stays the same when a launcher or a scheduler restarts its processes -- ------------------------------------------


def _job(environ: Mapping[str, str]) -> list[str]:
    """The names of the job to which these processes belong: torchrun's, and SLURM's."""
    elastic, slurm = environ.get("TORCHELASTIC_RUN_ID", "none"), environ.get("SLURM_JOB_ID")
    names = [] if elastic in ("", "none", "fit") else [f"torchelastic {elastic}"]  # torchrun's and fit's default names
    return [*names, f"slurm {slurm}"] if slurm else names


def _restarted_job_names(environ: Mapping[str, str]) -> list[str]:
    """The names that identify this job's run. A SLURM job counts only when it was requeued: an allocation may have started several runs."""
    return [name for name in _job(environ) if not name.startswith("slurm") or _restarted(environ)]


def _restarted(environ: Mapping[str, str]) -> bool:
    """Whether SLURM or torchrun has restarted the processes of this job."""
    return any(
        environ.get(name, "0") not in ("", "0") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    )


def _belongs_to(record: RunRecord, names: list[str]) -> bool:
    return any(name in record.job for name in names)
