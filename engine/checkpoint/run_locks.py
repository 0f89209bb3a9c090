"""The folders of runs that share a root: each run has its own folder and locks it while it runs.

The first run has the root itself, later ones have ``version_1``, ``version_2``, ... in it. A folder with a ``run.json`` is a run's: it
has the run's ``id``, and the host, process and time of its holder. On a file system the holder has the file locked (``flock``): the
kernel frees the lock when the process ends in any way. NFS extends the lock to all machines (version 4, or 3 with its lock daemon); when a
machine is lost, the server frees its locks after a lease (90 s is usual). Where there are no such locks (URLs, mounts with ``nolock``), a
process of the same host is recognised by its number and its start, and nothing is known of other hosts.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Protocol

from engine.checkpoint.remote_storage import FileSystem, reach
from engine.checkpoint.run_json import (
    ENDED,
    FAILED,
    LONGEST,
    RUN,
    RUNNING,
    Mark,
    continued,
    in_use,
    packed,
    parsed,
    read,
    runs_here,
    who,
)
from engine.checkpoint.storage import Storage
from engine.checkpoint.storage_paths import storage_of
from engine.utils.errors import FolderInUse
from engine.utils.log import logger

FIRST = "version_0"
"""Where a path names one run: the first one, whose folder is the root."""
_NUMBERED = re.compile(r"version_([1-9][0-9]{0,8})")
_PATIENCE = 3, 0.05
"""Attempts to get a lock, and seconds between two of them: another process may be checking whether it is free."""


class Held(Protocol):
    """A run's folder while this process holds it."""

    mark: Mark

    def close(self, failed: bool = False, wrote: bool = True) -> None:
        """Release it. An empty folder is removed; so is the mark of a new run that ``wrote`` nothing into a folder with other files."""


class Runs:
    """The runs that share a root. Subclasses handle file systems and URLs."""

    inner: str
    """Where in a run's folder the checkpoints are: ``"checkpoints"``, or ``""``."""

    def folder(self, number: int) -> str:
        """The folder of the run of this number; 0 is the root itself."""
        raise NotImplementedError

    def storage(self, number: int) -> Storage:
        """The folder of this run's checkpoints."""
        return storage_of(self._checkpoints(number))

    def _checkpoints(self, number: int) -> str:
        return f"{self.folder(number)}/{self.inner}" if self.inner else self.folder(number)

    def has_checkpoints(self, number: int) -> bool:
        """Whether this run has checkpoints, including unreadable ones."""
        root = self._checkpoints(number)
        try:
            if "://" not in root:
                os.stat(root)  # usually there is no such folder
            where = storage_of(root)
            return any(where.complete()) or any(not name.startswith(".") for name in where.incomplete())
        except FileNotFoundError:
            return False
        except PermissionError:
            return True

    def mark(self, number: int) -> Mark:
        """The run's mark; empty for an old run without a mark, and for an unreadable one."""
        raise NotImplementedError

    def holder(self, number: int) -> Mark | None:
        """Who holds the folder; ``None``: nobody, as far as known."""
        raise NotImplementedError

    def newest_first(self) -> Iterator[int]:
        """The numbers of the existing runs."""
        return (number for number in (*sorted(self._numbered(), reverse=True), 0) if self._is_run(number))

    def folders(self) -> list[str]:
        """All numbers that may be runs, the newest first."""
        return [*map(self.folder, sorted(self._numbered(), reverse=True)), self.folder(0)]

    def with_id(self, name: str) -> int | None:
        """The number of the run with this ``id``."""
        return next((number for number in self.newest_first() if self.mark(number).get("id") == name), None)

    def of(self, checkpoint: str) -> int | None:
        """The number of the run that a checkpoint belongs to, or a folder of checkpoints; ``None``: no run under this root has it."""
        wanted = {plain(checkpoint), plain(checkpoint.rstrip("/").rpartition("/")[0] or ".")}
        return next((number for number in self.newest_first() if plain(self.storage(number).root) in wanted), None)

    def claim(self, mark: Mark) -> tuple[int, Held]:
        """An unused folder for a new run.

        Raises:
            OSError: it cannot be created.
        """
        for number in count(max(self._numbered(), default=0)):
            held = self._take(number, mark, True)
            if held is not None:
                return number, held
        raise AssertionError

    def hold(self, number: int, mark: Mark) -> Held:
        """The folder of an existing run, to continue it. Its ``id`` stays.

        Raises:
            FolderInUse: another process holds it.
        """
        for attempt in range(_PATIENCE[0]):
            time.sleep(_PATIENCE[1] * bool(attempt))
            held = self._take(number, mark, False)
            if held is not None:
                return held
        raise FolderInUse(in_use(self.folder(number), self.mark(number)))

    def unused(self) -> int:
        """An unused number; nothing is locked."""
        last = max(self._numbered(), default=0)
        return last + 1 if last or self._is_run(0) else 0

    def _is_run(self, number: int) -> bool:
        return bool(self.mark(number)) or self.has_checkpoints(number)

    def _numbered(self) -> list[int]:
        """Numbers that are taken, by runs or by anything else."""
        raise NotImplementedError

    def _take(self, number: int, mark: Mark, new: bool) -> Held | None:
        """Lock and mark the folder; ``None``: it belongs to another run (``new``: or did)."""
        raise NotImplementedError


def runs(root: str | Path, inner: str = "") -> Runs:
    """The runs under a directory or a URL."""
    return RemoteRuns(str(root), inner) if "://" in str(root) else LocalRuns(Path(root), inner)


# -- on a file system -----------------------------------------------------------------------------------------------------------------


class LocalRuns(Runs):
    """Runs in a directory."""

    def __init__(self, root: Path, inner: str = "") -> None:
        self.root, self.inner = root.absolute(), inner  # a script may change the current directory

    def folder(self, number: int) -> str:
        return f"{self.root}/version_{number}" if number else str(self.root)

    def mark(self, number: int) -> Mark:
        try:
            descriptor = os.open(f"{self.folder(number)}/{RUN}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            return {}
        try:
            return read(descriptor)
        finally:
            os.close(descriptor)

    def holder(self, number: int) -> Mark | None:
        mark = self.mark(number)
        try:
            descriptor = os.open(f"{self.folder(number)}/{RUN}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            return None if _lock(descriptor, fcntl.LOCK_SH, mark) else mark
        finally:
            os.close(descriptor)

    def _numbered(self) -> list[int]:
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        return [int(found[1]) for name in names if (found := _NUMBERED.fullmatch(name))]

    def _take(self, number: int, mark: Mark, new: bool) -> Held | None:
        folder = Path(self.folder(number))
        path = folder / RUN
        if new and not path.exists() and (folder.exists() if number else self.has_checkpoints(number)):
            return None
        made = [*takewhile(lambda each: not os.path.exists(each), chain((folder,), folder.parents))]
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
        before = read(descriptor)
        free = _lock(descriptor, fcntl.LOCK_EX, before) and os.fstat(descriptor).st_nlink > 0
        if free and new:  # a folder with only a mark was left by a run that was killed before it wrote
            made_now = not number and os.fstat(descriptor).st_size == 0 and not self.has_checkpoints(0)
            free = made_now or os.listdir(folder) == [RUN]
        if not free:
            os.close(descriptor)
            return None
        return LocalHeld(
            descriptor, folder, [folder, *made[1:]] if number else made, mark if new else continued(before, mark), new
        )


class LocalHeld:
    """See :class:`Held`. The lock belongs to this process: a forked one does not keep it."""

    def __init__(self, descriptor: int, folder: Path, made: list[Path], mark: Mark, new: bool) -> None:
        self.mark, self._new = mark, new
        self._descriptor, self._folder, self._made = descriptor, folder, made
        try:
            self._write()
        except OSError:
            self.forget()
            raise
        _held.add(self)

    def _write(self) -> None:
        # In place, without truncating first: a kill, or a full disk, in between would leave a run without an id.
        text = packed(self.mark).ljust(min(os.fstat(self._descriptor).st_size, LONGEST))
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))

    def close(self, failed: bool = False, wrote: bool = True) -> None:
        if self._descriptor < 0:
            return
        try:
            if (self._new and not wrote) or os.listdir(self._folder) == [RUN]:
                (self._folder / RUN).unlink()
                for each in self._made:
                    each.rmdir()
            else:
                self.mark["status"] = FAILED if failed else ENDED
                self._write()
        except OSError:  # someone removed the folder, or wrote into its parent
            pass
        finally:
            self.forget()

    def forget(self) -> None:
        """Close the file and do nothing else."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_held: weakref.WeakSet[LocalHeld] = weakref.WeakSet()


def _forked() -> None:
    for held in list(_held):
        held.forget()


os.register_at_fork(after_in_child=_forked)


def _lock(descriptor: int, kind: int, mark: Mark) -> bool:
    """Whether the lock was acquired; where there are no locks, whether the process in the mark is gone."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return not runs_here(mark)
    return True


# -- at a URL ---------------------------------------------------------------------------------------------------------------------------


class RemoteRuns(Runs):
    """At a URL that fsspec knows. Nothing is locked there: two runs that start at the same moment may both take one folder."""

    def __init__(self, root: str, inner: str = "") -> None:
        self.root, self.inner = root.rstrip("/"), inner
        self.files, _ = reach(self.root)

    def folder(self, number: int) -> str:
        return f"{self.root}/version_{number}" if number else self.root

    def mark(self, number: int) -> Mark:
        try:
            return parsed(self.files.cat_file(self._file(number)))
        except FileNotFoundError:
            return {}

    def holder(self, number: int) -> Mark | None:
        mark = self.mark(number)
        return mark if runs_here(mark) else None

    def _file(self, number: int) -> str:
        return f"{reach(self.folder(number))[1]}/{RUN}"

    def _numbered(self) -> list[int]:
        try:
            names = [
                str(entry).rstrip("/").rpartition("/")[2] for entry in self.files.ls(reach(self.root)[1], detail=False)
            ]
        except FileNotFoundError:
            return []
        return [int(found[1]) for name in names if (found := _NUMBERED.fullmatch(name))]

    def _take(self, number: int, mark: Mark, new: bool) -> Held | None:
        before = self.mark(number)
        if runs_here(before) or (new and (before or number in self._numbered() or self.has_checkpoints(number))):
            return None
        if before.get("status") == RUNNING and before.get("host") != mark["host"]:
            logger.warning(
                "%s was last used by %s, and it is unknown whether it is still in use", self.folder(number), who(before)
            )
        held = RemoteHeld(self.files, self._file(number), mark if new else continued(before, mark), new)
        return held if self.mark(number).get("id") == held.mark["id"] else None


class RemoteHeld:
    """See :class:`Held`."""

    def __init__(self, files: FileSystem, path: str, mark: Mark, new: bool) -> None:
        self.mark, self._new = mark, new
        self._files, self._path = files, path
        files.makedirs(path.rpartition("/")[0])
        files.pipe_file(path, packed(mark))

    def close(self, failed: bool = False, wrote: bool = True) -> None:
        with suppress(OSError):
            if (self._new and not wrote) or len(self._files.find(self._path.rpartition("/")[0])) == 1:
                self._files.rm_file(self._path)
            else:
                self.mark["status"] = FAILED if failed else ENDED
                self._files.pipe_file(self._path, packed(self.mark))


def plain(path: str) -> str:
    """The same text for every spelling of a path."""
    return path.rstrip("/") if "://" in path else os.path.realpath(path)
