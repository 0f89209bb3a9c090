"""The runs that share a root folder: each has its own folder with a ``run.json``, and holds a lock on that file while it runs.

The first run's folder is the root itself, later runs have ``version_1``, ``version_2``, ... in it. Runs with a name stand side by side: ``name``,
``name_version_1``, ``name_version_2``, ... A ``run.json`` has the run's ``id``, and
the host, process and start time of its holder. On a file system the holder has the file locked (``flock``): the
kernel frees the lock when the process ends in any way. NFS extends the lock to all machines (version 4, or 3 with its lock daemon); when a
machine is lost, the server frees its locks after a lease (90 s is usual). Where there are no such locks (URLs, mounts with ``nolock``), a
process of the same host is recognised by its number and start time, and nothing is known of processes on other hosts.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import stat
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any

from engine.checkpoint.remote_storage import reach
from engine.checkpoint.storage import Storage
from engine.checkpoint.storage_paths import storage_of
from engine.utils.errors import FolderInUse
from engine.utils.hard_links import separate
from engine.utils.log import logger
from engine.utils.paths import expanded

RUN = "run.json"
"""The file in a run's folder that holds its :class:`RunRecord`."""
FIRST = "version_0"
"""How a path can name the first run, whose folder is the root itself."""
RUNNING, ENDED, FAILED = "running", "ended", "failed"
_NUMBERED = re.compile(r"(?:(.*)_)?version_([1-9][0-9]{0,8})", re.DOTALL)
"""The folder of a later run: the runs' name, if they have one, and the run's number."""
_PATIENCE = 3, 0.05
"""The number of attempts to get a lock, and the seconds between them: a process that only checks whether a lock is free holds it briefly."""
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
"""The flags for opening a ``run.json``: in its place could be a pipe or a link."""
_MAX_BYTES = 1 << 16
"""The maximum number of bytes to read from a ``run.json``."""


@dataclass(frozen=True)
class RunRecord:
    """The content of ``run.json``: which run a folder belongs to, and which process holds it or held it last.

    When the file is read, a field of the wrong type counts as missing. A record without any field is false.
    """

    id: str = ""
    """The run's id, which stays the same when the run is continued."""
    stage: str = ""
    """The run's purpose: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""
    job: tuple[str, ...] = ()
    """The names of the job to which the run's processes belong."""
    host: str = ""
    pid: int = 0
    process: str | None = None
    """The start of the process in ticks since boot; ``None`` where the system does not tell."""
    since: str = ""
    status: str = ""
    """:data:`RUNNING`, :data:`ENDED` or :data:`FAILED`."""
    began_with: str = ""
    """The checkpoint of another run with which a new run began: whose weights it loaded, or from which it resumed."""
    ended_at: tuple[int, ...] = ()
    """The steps at which trainings of the run have ended by themselves, with all they do at their end."""

    @classmethod
    def of_this_process(cls, id: str, stage: str, job: Sequence[str]) -> RunRecord:
        """The record of a run that this process starts now."""
        since, pid = time.strftime("%Y-%m-%d %H:%M:%S %z"), os.getpid()
        return cls(id, stage, tuple(job), socket.gethostname(), pid, _process_start(pid), since, RUNNING)

    @classmethod
    def parse(cls, text: bytes) -> RunRecord:
        """Parse the content of a ``run.json``; anything else gives an empty record."""
        try:
            values = json.loads(text[:_MAX_BYTES])
        except (ValueError, RecursionError):
            return NO_RECORD
        if not isinstance(values, dict):
            return NO_RECORD
        texts = {
            name: values[name]
            for name in ("id", "stage", "host", "process", "since", "status", "began_with")
            if type(values.get(name)) is str
        }
        job, pid, ended_at = values.get("job"), values.get("pid"), values.get("ended_at")
        names = tuple(name for name in job if type(name) is str) if type(job) is list else ()
        steps = tuple(step for step in ended_at if type(step) is int) if type(ended_at) is list else ()
        return cls(**texts, job=names, pid=pid if type(pid) is int else 0, ended_at=steps)

    def __bool__(self) -> bool:
        return self != NO_RECORD

    def text(self) -> bytes:
        """The record as the content of a ``run.json``."""
        values = {name: value for name, value in vars(self).items() if name not in ("began_with", "ended_at") or value}
        # Like indent=1, which would use Python's slow encoder.
        return json.dumps(values, separators=(",\n ", ": ")).encode()

    def continuing(self, previous: RunRecord) -> RunRecord:
        """This record for the folder of an earlier run, with that run's id, ``began_with`` and ``ended_at``; unless this process trains, also its
        stage and job."""
        record = replace(self, id=previous.id or self.id, began_with=previous.began_with, ended_at=previous.ended_at)
        if self.stage == "fit" or not previous:
            return record
        return replace(record, stage=previous.stage or self.stage, job=previous.job)

    @property
    def owner(self) -> str:
        """The process that holds the folder, or held it last, for messages."""
        host, pid, since = (ascii(value or "unknown").strip("'")[:80] for value in (self.host, self.pid, self.since))
        return f"process {pid} on {host} (since {since})"

    @property
    def runs_here(self) -> bool:
        """True if the process is on this host and still running."""
        if self.status != RUNNING or self.host != socket.gethostname() or not 0 < self.pid < 1 << 31:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass
        return _process_start(self.pid) == self.process

    def in_use(self, folder: str) -> FolderInUse:
        """The error for a second run that wants ``folder``."""
        return FolderInUse(
            f"{folder} is in use by {self.owner}: two runs cannot write into one folder. Wait for that run or end it; a new run (without resume=) "
            "gets its own folder, and so does one with another root_dir"
        )


NO_RECORD = RunRecord()
"""The record of a folder without one."""


def _process_start(pid: int) -> str | None:
    """The start of a process in ticks since boot; ``None`` where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return None


class RunRoot(ABC):
    """The runs that share a root and a name, or have none. The implementations are :class:`LocalRunRoot` and :class:`RemoteRunRoot`;
    :func:`run_root_of` chooses one."""

    root: str
    subfolder: str
    """The folder of checkpoints within a run's folder: ``"checkpoints"``, or ``""`` for the run's folder itself."""
    name: str
    """The runs' name; empty: runs without a name."""

    def folder(self, number: int) -> str:
        """The folder of the run of this number; 0 is the first, which without a name has the root itself."""
        if self.name:
            return f"{self.root}/{self.name}_version_{number}" if number else f"{self.root}/{self.name}"
        return f"{self.root}/version_{number}" if number else self.root

    def storage(self, number: int) -> Storage:
        """The storage of this run's checkpoints."""
        return storage_of(self._checkpoints(number))

    def _checkpoints(self, number: int) -> str:
        return f"{self.folder(number)}/{self.subfolder}" if self.subfolder else self.folder(number)

    def has_checkpoints(self, number: int) -> bool:
        """Whether this run has checkpoints, including unreadable ones."""
        root = self._checkpoints(number)
        try:
            if "://" not in root:
                os.stat(root)  # usually there is no such folder
            storage = storage_of(root)
            return any(storage.complete()) or any(not name.startswith(".") for name in storage.incomplete())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except PermissionError:
            return True

    @abstractmethod
    def record(self, number: int) -> RunRecord:
        """The run's record; empty if the run is too old to have one, or if the record is unreadable."""

    @abstractmethod
    def holder(self, number: int) -> RunRecord | None:
        """The record of the process that holds the folder; ``None`` if none is known to hold it."""

    def newest_first(self) -> Iterator[int]:
        """The numbers of the existing runs, newest first."""
        return (number for number in (*sorted(self._numbers(), reverse=True), 0) if self._is_run(number))

    def folders(self) -> list[str]:
        """All folders that may be runs, newest first."""
        return [*map(self.folder, sorted(self._numbers(), reverse=True)), self.folder(0)]

    def with_id(self, id: str) -> int | None:
        """The number of the run with this ``id``; ``None`` if there is none."""
        return next((number for number in self.newest_first() if self.record(number).id == id), None)

    def number_of_run(self, checkpoint: str) -> int | None:
        """The number of the run to which a checkpoint, or a folder of checkpoints, belongs; ``None``: to no run under this root."""
        roots = {canonical(checkpoint), canonical(checkpoint.rstrip("/").rpartition("/")[0] or ".")}
        return next((number for number in self.newest_first() if canonical(self.storage(number).root) in roots), None)

    def name_of_run(self, checkpoint: str) -> str:
        """The name of the run in this root to which a checkpoint, or a folder of checkpoints, belongs; empty: to none with a name."""
        for place in (canonical(checkpoint), canonical(checkpoint.rstrip("/").rpartition("/")[0] or ".")):
            run_folder = place.removesuffix(f"/{self.subfolder}") if self.subfolder else place
            parent, _, last = run_folder.rpartition("/")
            if parent != canonical(self.root):
                continue
            name = (match[1] or "") if (match := _NUMBERED.fullmatch(last)) else last
            runs = run_root_of(self.root, self.subfolder, name)
            if name and (number := runs.number_of_run(checkpoint)) is not None and runs.record(number):
                return name
        return ""

    def claim(self, record: RunRecord) -> Claim:
        """Take an unused folder for a new run.

        Raises:
            OSError: the folder cannot be created.
        """
        for number in count(max(self._numbers(), default=0)):
            claim = self._lock_folder(number, record, True)
            if claim is not None:
                return claim
        raise AssertionError

    def hold(self, number: int, record: RunRecord) -> Claim:
        """Take the folder of an existing run to continue that run, whose ``id`` stays the same.

        Raises:
            FolderInUse: another process holds the folder.
        """
        for attempt in range(_PATIENCE[0]):
            time.sleep(_PATIENCE[1] * bool(attempt))
            claim = self._lock_folder(number, record, False)
            if claim is not None:
                return claim
        raise self.record(number).in_use(self.folder(number))

    def earlier_run(self, number: int) -> int | None:
        """The number of a run that was there before the new run ``number``: the first of all, or else the newest; ``None``: there is none."""
        if number and self._is_run(0):
            return 0
        return next((other for other in self.newest_first() if other != number), None)

    def unused(self) -> int:
        """A run number that is not in use yet; it is not reserved."""
        last = max(self._numbers(), default=0)
        return last + 1 if last or self._is_run(0) else 0

    def _is_run(self, number: int) -> bool:
        return bool(self.record(number)) or self.has_checkpoints(number)

    def _numbers(self) -> list[int]:
        """The numbers of existing ``version_<number>`` entries of this name, whether they are runs or not."""
        try:
            names = self._names()
        except FileNotFoundError:
            return []
        matches = (match for entry in names if (match := _NUMBERED.fullmatch(entry)))
        return [int(match[2]) for match in matches if (match[1] or "") == self.name]

    @abstractmethod
    def _names(self) -> list[str]:
        """The names of the root's entries; ``FileNotFoundError`` if there is no root yet."""

    @abstractmethod
    def _lock_folder(self, number: int, record: RunRecord, new: bool) -> Claim | None:
        """Lock the folder and write the record; ``None``: another process holds the folder or, with ``new``, any run has used it."""

    @abstractmethod
    def write(self, claim: Claim) -> None:
        """Write the record of a claim into its folder."""

    @abstractmethod
    def has_only_record(self, claim: Claim) -> bool:
        """Check that the folder of a claim contains nothing but the record."""

    @abstractmethod
    def forget(self, claim: Claim) -> None:
        """Delete the record of a claim, and those folders created for it that are empty."""


class Claim:
    """A run's folder while this process holds it; :meth:`RunRoot.claim` and :meth:`RunRoot.hold` return one.

    Args:
        is_new: True for a new run, False for an earlier one that is continued.
        lock: the descriptor of the locked ``run.json``; ``None`` where there are no locks. Forked processes close their copy.
        created: the folders that were created for the claim, innermost first.
    """

    def __init__(
        self,
        root: RunRoot,
        number: int,
        record: RunRecord,
        is_new: bool,
        lock: int | None = None,
        created: Sequence[Path] = (),
    ) -> None:
        self.root, self.number, self.record, self.is_new = root, number, record, is_new
        self.lock, self.created = lock, created
        try:
            root.write(self)
        except OSError:
            self.unlock()
            raise
        _claims.add(self)

    def close(self, failed: bool = False, wrote: bool = True, ended_at: int | None = None) -> None:
        """Release the folder. The record, and then the empty folder, are deleted if there is nothing else, or if a new run ``wrote`` nothing.

        Args:
            ended_at: the step at which a training has ended by itself.
        """
        if self not in _claims:
            return
        try:
            if (self.is_new and not wrote) or self.root.has_only_record(self):
                self.root.forget(self)
            else:
                steps = self.record.ended_at if ended_at is None else tuple({*self.record.ended_at, ended_at})
                self.record = replace(self.record, status=FAILED if failed else ENDED, ended_at=steps)
                self.root.write(self)
        except OSError:  # someone removed the folder, or wrote into its parent
            pass
        finally:
            self.unlock()

    def note_beginning(self, checkpoint: str) -> None:
        """Record that this new run began with another run's ``checkpoint``."""
        self.record = replace(self.record, began_with=checkpoint)
        self.root.write(self)

    def unlock(self) -> None:
        """Release the lock without changing any file."""
        _claims.discard(self)
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


_claims: weakref.WeakSet[Claim] = weakref.WeakSet()
"""The open claims of this process."""


def _unlock_after_fork() -> None:
    for claim in list(_claims):
        claim.unlock()


os.register_at_fork(after_in_child=_unlock_after_fork)


def run_root_of(root: str | Path, subfolder: str = "", name: str = "") -> RunRoot:
    """The :class:`RunRoot` of a directory or a URL, for runs with this ``name``, or for runs without a name."""
    if "://" in str(root):
        return RemoteRunRoot(str(root), subfolder, name)
    return LocalRunRoot(Path(expanded(root)), subfolder, name)


class LocalRunRoot(RunRoot):
    """Runs in a local directory."""

    def __init__(self, root: Path, subfolder: str = "", name: str = "") -> None:
        self.root = str(root.absolute())  # a script may change the current directory
        self.subfolder, self.name = subfolder, name

    def record(self, number: int) -> RunRecord:
        try:
            descriptor = os.open(f"{self.folder(number)}/{RUN}", _READ)
        except OSError:
            return NO_RECORD
        try:
            return _read(descriptor)
        finally:
            os.close(descriptor)

    def holder(self, number: int) -> RunRecord | None:
        record = self.record(number)
        try:
            descriptor = os.open(f"{self.folder(number)}/{RUN}", _READ)
        except OSError:
            return None
        try:
            return None if _lock(descriptor, fcntl.LOCK_SH, record) else record
        finally:
            os.close(descriptor)

    def _names(self) -> list[str]:
        return os.listdir(self.root)

    def _lock_folder(self, number: int, record: RunRecord, new: bool) -> Claim | None:
        """Lock a run's folder (0: the root itself) and write its record; ``None``: another run has it, or ``new`` is asked for and it is not."""
        folder = Path(self.folder(number))
        path = folder / RUN
        if folder.is_file():
            raise NotADirectoryError(
                f"{folder} is a file, and a run needs a folder there: move it away, or give another name or root_dir"
            )
        if new and not path.exists() and (folder.exists() if number else self.has_checkpoints(number)):
            return None
        created = [*takewhile(lambda parent: not os.path.exists(parent), chain((folder,), folder.parents))]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            return None  # the holder has just deleted the folder
        except OSError:
            if new and os.path.lexists(path):
                return None  # another user's file, or not a regular one
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            if new:
                return None
            raise OSError(errno.EINVAL, "this is not a file", str(path))
        before = _read(descriptor)
        free = _lock(descriptor, fcntl.LOCK_EX, before) and _is_at(descriptor, path)
        if (
            free and os.fstat(descriptor).st_nlink > 1
        ):  # a backup made by cp -al, or a file from elsewhere, which stays as it is
            separate(path)
            if not _is_at(descriptor, path):
                os.close(descriptor)
                return self._lock_folder(number, record, new)
        if free and new:  # a folder with only a record was left by a run that was killed before it wrote anything
            created_now = not number and os.fstat(descriptor).st_size == 0 and not self.has_checkpoints(0)
            free = created_now or os.listdir(folder) == [RUN]
        if not free:
            os.close(descriptor)
            return None
        created = [folder, *created[1:]] if number else created
        return Claim(self, number, record if new else record.continuing(before), new, descriptor, created)

    def write(self, claim: Claim) -> None:
        # Overwritten in place: truncating first would leave a run without an id after a kill or on a full disk.
        assert claim.lock is not None
        size = os.fstat(claim.lock).st_size
        text = claim.record.text().ljust(min(size, _MAX_BYTES))
        os.pwrite(claim.lock, text, 0)
        if size > len(text):
            os.ftruncate(claim.lock, len(text))

    def has_only_record(self, claim: Claim) -> bool:
        return os.listdir(self.folder(claim.number)) == [RUN]

    def forget(self, claim: Claim) -> None:
        os.unlink(f"{self.folder(claim.number)}/{RUN}")
        for folder in claim.created:
            folder.rmdir()


def _read(descriptor: int) -> RunRecord:
    """The record in an open file, which need not be a regular one."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return NO_RECORD
    return RunRecord.parse(os.pread(descriptor, _MAX_BYTES, 0))


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at ``path``: it may have been deleted or replaced since it was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _lock(descriptor: int, kind: int, record: RunRecord) -> bool:
    """Try to lock a file. Where there are no locks: whether the process named in ``record`` is gone."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return not record.runs_here
    return True


class RemoteRunRoot(RunRoot):
    """Runs at a URL. There are no locks: two runs that start at the same moment may take the same folder."""

    def __init__(self, root: str, subfolder: str = "", name: str = "") -> None:
        self.root, self.subfolder, self.name = root.rstrip("/"), subfolder, name
        self._files, _ = reach(self.root)

    def record(self, number: int) -> RunRecord:
        try:
            return RunRecord.parse(self._files.cat_file(f"{self._inner_path(number)}/{RUN}"))
        except FileNotFoundError:
            return NO_RECORD

    def holder(self, number: int) -> RunRecord | None:
        record = self.record(number)
        return record if record.runs_here else None

    def _inner_path(self, number: int) -> str:
        """The path of a run's folder within the URL's file system."""
        return reach(self.folder(number))[1]

    def _names(self) -> list[str]:
        entries: list[Any] = self._files.ls(reach(self.root)[1], detail=False)
        return [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]

    def _lock_folder(self, number: int, record: RunRecord, new: bool) -> Claim | None:
        before = self.record(number)
        if before.runs_here or (new and (before or number in self._numbers() or self.has_checkpoints(number))):
            return None
        if before.status == RUNNING and before.host != record.host:
            logger.warning(
                "%s was last used by %s, and it is unknown whether it is still in use",
                self.folder(number),
                before.owner,
            )
        claim = Claim(self, number, record if new else record.continuing(before), new)
        return claim if self.record(number).id == claim.record.id else None

    def write(self, claim: Claim) -> None:
        folder = self._inner_path(claim.number)
        self._files.makedirs(folder)
        self._files.pipe_file(f"{folder}/{RUN}", claim.record.text())

    def has_only_record(self, claim: Claim) -> bool:
        return len(self._files.find(self._inner_path(claim.number))) == 1

    def forget(self, claim: Claim) -> None:
        self._files.rm_file(f"{self._inner_path(claim.number)}/{RUN}")


def canonical(path: str) -> str:
    """The canonical form of a path or URL, for comparisons."""
    return path.rstrip("/") if "://" in path else os.path.realpath(path)
