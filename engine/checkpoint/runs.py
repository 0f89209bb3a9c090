"""The runs that share a root: each has its own folder, says so in ``run.json``, and locks that file while it runs.

The first run has the root itself, later ones have ``version_1``, ``version_2``, ... in it. A folder with a ``run.json`` is a run's: it
has the run's ``id``, and the host, process and time of its holder. On a file system the holder has the file locked (``flock``): the
kernel frees the lock when the process ends in any way. NFS extends the lock to all machines (version 4, or 3 with its lock daemon); when a
machine is lost, the server frees its locks after a lease (90 s is usual). Where there are no such locks (URLs, mounts with ``nolock``), a
process of the same host is recognised by its number and its start, and nothing is known of other hosts.
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
from engine.utils.log import logger

RUN = "run.json"
FIRST = "version_0"
"""Where a path names one run: the first one, whose folder is the root."""
RUNNING, ENDED, FAILED = "running", "ended", "failed"
_NUMBERED = re.compile(r"version_([1-9][0-9]{0,8})")
_PATIENCE = 3, 0.05
"""Attempts to get a lock, and seconds between two of them: another process may be checking whether it is free."""
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
"""How a ``run.json`` is opened, which may be a pipe or a link."""
_LONGEST = 1 << 16
"""The maximum bytes that are read of a ``run.json``."""


@dataclass(frozen=True)
class RunRecord:
    """The content of ``run.json``: whose a folder is, and which process holds it or held it last.

    It is read without trust: a field of another type counts as missing. A record without any field is false.
    """

    id: str = ""
    """The run's id, which stays when the run is continued."""
    stage: str = ""
    """Purpose of the run: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""
    job: tuple[str, ...] = ()
    """Names of the job that the processes belong to."""
    host: str = ""
    pid: int = 0
    process: str | None = None
    """The start of the process, in ticks since boot; ``None`` where the system does not say."""
    since: str = ""
    status: str = ""
    """:data:`RUNNING`, :data:`ENDED` or :data:`FAILED`."""

    @classmethod
    def of_this_process(cls, id: str, stage: str, job: Sequence[str]) -> RunRecord:
        """The record of a run that this process starts now."""
        since, pid = time.strftime("%Y-%m-%d %H:%M:%S %z"), os.getpid()
        return cls(id, stage, tuple(job), socket.gethostname(), pid, _process_start(pid), since, RUNNING)

    @classmethod
    def parse(cls, text: bytes) -> RunRecord:
        """Read the content of a ``run.json``; text without such content gives an empty record."""
        try:
            values = json.loads(text[:_LONGEST])
        except (ValueError, RecursionError):
            return NO_RECORD
        if not isinstance(values, dict):
            return NO_RECORD
        texts = {
            name: values[name]
            for name in ("id", "stage", "host", "process", "since", "status")
            if type(values.get(name)) is str
        }
        job, pid = values.get("job"), values.get("pid")
        names = tuple(name for name in job if type(name) is str) if type(job) is list else ()
        return cls(**texts, job=names, pid=pid if type(pid) is int else 0)

    def __bool__(self) -> bool:
        return self != NO_RECORD

    def text(self) -> bytes:
        """The content of the file."""
        return json.dumps(
            vars(self), separators=(",\n ", ": ")
        ).encode()  # as with indent=1, which Python's slow encoder does

    def continuing(self, before: RunRecord) -> RunRecord:
        """This process's record in the folder of an earlier run: the id stays, and where the run is only evaluated its stage and job."""
        record = replace(self, id=before.id or self.id)
        if self.stage == "fit" or not before:
            return record
        return replace(record, stage=before.stage or self.stage, job=before.job)

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
    """The start of a process in ticks since boot; ``None`` where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return None


class RunRoot(ABC):
    """The runs that share a root. The implementations are :class:`LocalRunRoot` and :class:`RemoteRunRoot`; :func:`run_root_of` chooses one."""

    root: str
    inner: str
    """Where in a run's folder the checkpoints are: ``"checkpoints"``, or ``""``."""

    def folder(self, number: int) -> str:
        """The folder of the run of this number; 0 is the root itself."""
        return f"{self.root}/version_{number}" if number else self.root

    def storage(self, number: int) -> Storage:
        """The storage of this run's checkpoints."""
        return storage_of(self._checkpoints(number))

    def _checkpoints(self, number: int) -> str:
        return f"{self.folder(number)}/{self.inner}" if self.inner else self.folder(number)

    def has_checkpoints(self, number: int) -> bool:
        """Whether this run has checkpoints, including unreadable ones."""
        root = self._checkpoints(number)
        try:
            if "://" not in root:
                os.stat(root)  # usually there is no such folder
            storage = storage_of(root)
            return any(storage.complete()) or any(not name.startswith(".") for name in storage.incomplete())
        except FileNotFoundError:
            return False
        except PermissionError:
            return True

    @abstractmethod
    def record(self, number: int) -> RunRecord:
        """The run's record; empty for an old run without one, and for an unreadable one."""

    @abstractmethod
    def holder(self, number: int) -> RunRecord | None:
        """The record of the process that holds the folder; ``None``: nobody does, as far as known."""

    def newest_first(self) -> Iterator[int]:
        """The numbers of the existing runs."""
        return (number for number in (*sorted(self._numbers(), reverse=True), 0) if self._is_run(number))

    def folders(self) -> list[str]:
        """All folders that may be runs, the newest first."""
        return [*map(self.folder, sorted(self._numbers(), reverse=True)), self.folder(0)]

    def with_id(self, id: str) -> int | None:
        """The number of the run with this ``id``."""
        return next((number for number in self.newest_first() if self.record(number).id == id), None)

    def number_of_run(self, checkpoint: str) -> int | None:
        """The number of the run that a checkpoint, or a folder of checkpoints, belongs to; ``None``: no run under this root has it."""
        roots = {canonical(checkpoint), canonical(checkpoint.rstrip("/").rpartition("/")[0] or ".")}
        return next((number for number in self.newest_first() if canonical(self.storage(number).root) in roots), None)

    def claim(self, record: RunRecord) -> Claim:
        """Take an unused folder for a new run.

        Raises:
            OSError: it cannot be created.
        """
        for number in count(max(self._numbers(), default=0)):
            claim = self._lock_folder(number, record, True)
            if claim is not None:
                return claim
        raise AssertionError

    def hold(self, number: int, record: RunRecord) -> Claim:
        """Take the folder of an existing run, to continue it. Its ``id`` stays.

        Raises:
            FolderInUse: another process holds it.
        """
        for attempt in range(_PATIENCE[0]):
            time.sleep(_PATIENCE[1] * bool(attempt))
            claim = self._lock_folder(number, record, False)
            if claim is not None:
                return claim
        raise self.record(number).in_use(self.folder(number))

    def unused(self) -> int:
        """An unused number; nothing is locked."""
        last = max(self._numbers(), default=0)
        return last + 1 if last or self._is_run(0) else 0

    def _is_run(self, number: int) -> bool:
        return bool(self.record(number)) or self.has_checkpoints(number)

    def _numbers(self) -> list[int]:
        """Numbers that are taken, by runs or by anything else."""
        try:
            names = self._names()
        except FileNotFoundError:
            return []
        return [int(numbered[1]) for name in names if (numbered := _NUMBERED.fullmatch(name))]

    @abstractmethod
    def _names(self) -> list[str]:
        """The names of the entries of the root, which may not exist."""

    @abstractmethod
    def _lock_folder(self, number: int, record: RunRecord, new: bool) -> Claim | None:
        """Lock the folder and write its record; ``None``: it belongs to another run (``new``: or did)."""

    @abstractmethod
    def write(self, claim: Claim) -> None:
        """Write the record of a claim into its folder."""

    @abstractmethod
    def has_only_record(self, claim: Claim) -> bool:
        """Check that nothing but the record is in the folder of a claim."""

    @abstractmethod
    def forget(self, claim: Claim) -> None:
        """Delete the record of a claim, and the folders that were made for it if they are empty."""


class Claim:
    """A run's folder while this process holds it; :meth:`RunRoot.claim` and :meth:`RunRoot.hold` return one.

    Args:
        is_new: the run begins; else an earlier one is continued.
        lock: the descriptor of the locked ``run.json``; ``None``: nothing can be locked there. The lock belongs to this process: a forked one does
            not keep it.
        created: the folders that were made for it, the innermost first.
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

    def close(self, failed: bool = False, wrote: bool = True) -> None:
        """Release the folder. An empty one is removed; so is the record of a new run that ``wrote`` nothing into a folder with other files."""
        if self not in _claims:
            return
        try:
            if (self.is_new and not wrote) or self.root.has_only_record(self):
                self.root.forget(self)
            else:
                self.record = replace(self.record, status=FAILED if failed else ENDED)
                self.root.write(self)
        except OSError:  # someone removed the folder, or wrote into its parent
            pass
        finally:
            self.unlock()

    def unlock(self) -> None:
        """Give up the lock, and do nothing else."""
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


def run_root_of(root: str | Path, inner: str = "") -> RunRoot:
    """The :class:`RunRoot` of a directory or a URL."""
    return RemoteRunRoot(str(root), inner) if "://" in str(root) else LocalRunRoot(Path(root), inner)


class LocalRunRoot(RunRoot):
    """Runs in a directory."""

    def __init__(self, root: Path, inner: str = "") -> None:
        self.root, self.inner = str(root.absolute()), inner  # a script may change the current directory

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
        folder = Path(self.folder(number))
        path = folder / RUN
        if new and not path.exists() and (folder.exists() if number else self.has_checkpoints(number)):
            return None
        created = [*takewhile(lambda parent: not os.path.exists(parent), chain((folder,), folder.parents))]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            return None  # its holder has just removed it
        except OSError:
            if new and os.path.lexists(path):
                return None  # another user's, or not a file
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            if new:
                return None
            raise OSError(errno.EINVAL, "this is not a file", str(path))
        before = _read(descriptor)
        free = _lock(descriptor, fcntl.LOCK_EX, before) and os.fstat(descriptor).st_nlink > 0
        if free and new:  # a folder with only a record was left by a run that was killed before it wrote
            created_now = not number and os.fstat(descriptor).st_size == 0 and not self.has_checkpoints(0)
            free = created_now or os.listdir(folder) == [RUN]
        if not free:
            os.close(descriptor)
            return None
        created = [folder, *created[1:]] if number else created
        return Claim(self, number, record if new else record.continuing(before), new, descriptor, created)

    def write(self, claim: Claim) -> None:
        # In place, without truncating first: a kill, or a full disk, in between would leave a run without an id.
        assert claim.lock is not None
        text = claim.record.text().ljust(min(os.fstat(claim.lock).st_size, _LONGEST))
        os.pwrite(claim.lock, text, 0)
        os.ftruncate(claim.lock, len(text))

    def has_only_record(self, claim: Claim) -> bool:
        return os.listdir(self.folder(claim.number)) == [RUN]

    def forget(self, claim: Claim) -> None:
        os.unlink(f"{self.folder(claim.number)}/{RUN}")
        for folder in claim.created:
            folder.rmdir()


def _read(descriptor: int) -> RunRecord:
    """The record in an open file, which may be anything."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return NO_RECORD
    return RunRecord.parse(os.pread(descriptor, _LONGEST, 0))


def _lock(descriptor: int, kind: int, record: RunRecord) -> bool:
    """Try to lock a file; where there are no locks, True if the process in the record is gone."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return not record.runs_here
    return True


class RemoteRunRoot(RunRoot):
    """Runs at a URL that fsspec knows. Nothing is locked there: two runs that start at the same moment may both take one folder."""

    def __init__(self, root: str, inner: str = "") -> None:
        self.root, self.inner = root.rstrip("/"), inner
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
        """The run's folder in the file system of the URL."""
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
