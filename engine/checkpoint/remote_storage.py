"""Checkpoints and other files at a URL, through fsspec."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from engine.checkpoint.files import (
    LARGEST_JSON,
    DamagedCheckpoint,
    Record,
    check_entry,
    check_json_size,
    inside,
    is_entry,
    json_text,
    parse_json,
)
from engine.checkpoint.local_storage import read_manifest
from engine.checkpoint.manifest import FOLDERS, JOINED, MANIFEST, check_manifest, manifest_of, next_serial
from engine.checkpoint.storage import Draft, Incomplete, Storage
from engine.utils.paths import expanded
from engine.utils.text import has_password, terminal_text

_WITH_BUCKETS = frozenset(
    ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "obs", "cos", "cosn", "tos", "swift", "b2")
)
"""fsspec's names of storages whose paths begin with a bucket (or container). They have no folders, and fsspec's ``makedirs`` creates the bucket."""


class FileSystem:
    """The fsspec file system of a URL, with methods of the same names.

    Raises:
        FileNotFoundError: raised by fsspec.
        OSError: in place of any other error. Each of fsspec's back ends has errors of its own, many of which do not name the URL.
    """

    def __init__(self, url: str, files: Any) -> None:
        self._url, self._files = url, files
        protocols = (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)
        self._has_buckets, self._has_links = not _WITH_BUCKETS.isdisjoint(protocols), "http" in protocols
        self._found_buckets: set[str] = set()

    def exists(self, path: str) -> bool:
        return bool(self._call(self._files.exists, path))

    def ls(self, path: str, detail: bool) -> list[Any]:
        entries = list(self._call(self._files.ls, path, detail=detail))
        if detail:
            return [{**entry, "name": self._decoded(entry["name"])} for entry in entries]
        return [self._decoded(entry) for entry in entries]

    def find(self, path: str, **options: Any) -> Any:
        entries = self._call(self._files.find, path, **options)
        if isinstance(entries, dict):
            return {self._decoded(entry): details for entry, details in entries.items()}
        return [self._decoded(entry) for entry in entries]

    def _decoded(self, path: str) -> str:
        """A path in a listing. A web server's page has links, in which ``=`` may be ``%3D``."""
        return unquote(path) if self._has_links else path

    def size(self, path: str) -> int | None:
        size: int | None = self._call(self._files.size, path)
        return size

    def cat_file(self, path: str) -> bytes:
        """Read a JSON file.

        Raises:
            DamagedCheckpoint: the file is larger than ``LARGEST_JSON``.
        """
        content: bytes = self._call(self._files.cat_file, path, start=0, end=LARGEST_JSON + 1)
        check_json_size(path, len(content))
        return content

    def get_file(self, path: str, local: str) -> None:
        self._call(self._files.get_file, path, local)

    def put_file(self, local: str, path: str) -> None:
        self._call(self._files.put_file, local, path)

    def pipe_file(self, path: str, content: bytes) -> None:
        self._call(self._files.pipe_file, path, content)

    def makedirs(self, path: str) -> None:
        """Create a folder, so that files can be written in it. A bucket is never created: its name may be mistyped.

        Raises:
            FileNotFoundError: the path's bucket does not exist.
        """
        self.check_bucket(path)
        if not self._has_buckets:
            self._call(self._files.makedirs, path, exist_ok=True)

    def check_bucket(self, path: str) -> None:
        """Check, once, that the bucket of a path exists.

        Raises:
            FileNotFoundError: it does not.
        """
        bucket = path.lstrip("/").partition("/")[0]
        if not self._has_buckets or bucket in self._found_buckets:
            return
        if not self._call(self._files.exists, bucket):
            raise FileNotFoundError(
                f"{terminal_text(without_query(self._url))}: there is no bucket {bucket!r}, or it may not be read with the access that fsspec "
                "was given. Check its name, or create it: a run creates none"
            )
        self._found_buckets.add(bucket)

    def rm(self, path: str, recursive: bool) -> None:
        self._call(self._files.rm, path, recursive=recursive)

    def rm_file(self, path: str) -> None:
        self._call(self._files.rm_file, path)

    def invalidate_cache(self, path: str) -> None:
        self._call(self._files.invalidate_cache, path)

    def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a method of fsspec, and raise its errors in the form that the class describes."""
        try:
            return method(*arguments, **options)
        except FileNotFoundError:
            raise
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if signature := self._url.partition("?")[2]:
                message = message.replace(signature, "...")
            raise OSError(
                f"{terminal_text(without_query(self._url))}: {terminal_text(message, one_line=True)}. Check the URL, the network, and the access "
                "that fsspec was given"
            ) from error


def reach(url: str) -> tuple[FileSystem, str]:
    """The fsspec file system of a URL, and the path in it.

    Raises:
        ValueError: fsspec does not know the protocol, the protocol's package is missing, or the URL has a password, which would appear in logs,
            records and pages.
    """
    import fsspec

    if has_password(url):
        raise ValueError(
            f"{terminal_text(url)}: a URL with a password is not taken, since paths stand in logs, records and reports. Give the password to fsspec: "
            "as FSSPEC_FTP_PASSWORD in the environment (for ftp://; likewise for others), or in ~/.config/fsspec"
        )
    try:
        files, inner = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError, TypeError, LookupError, AttributeError, RuntimeError, OSError) as error:
        # For a URL that lacks a part (github://x has no owner), fsspec raises whatever the back end's constructor raises.
        raise ValueError(f"{url}: {error}") from error
    return FileSystem(url, files), str(inner)


def without_query(path: str | Path) -> str:
    """A path, or a URL without its query, so that it may be shown: the query may be a signature that gives anyone access."""
    return str(path).partition("?")[0] if "://" in str(path) else str(path)


@contextmanager
def local_copy(path: str | Path) -> Iterator[Path]:
    """Yield a local path of a file or directory: ``path`` itself, or a copy of a URL's content that is deleted at the context's end.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        ValueError: fsspec does not know the protocol.
    """
    if "://" not in str(path):
        local_path = Path(expanded(path))
        if not local_path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        yield local_path
        return
    files, inner = reach(str(path))
    if not files.exists(inner):
        raise FileNotFoundError(f"{without_query(path)} does not exist")
    with tempfile.TemporaryDirectory(prefix="copy-") as folder:
        target = Path(folder) / without_query(path).rstrip("/").rpartition("/")[2]
        for file in files.find(inner):
            to = target if file == inner else inside(target, file.removeprefix(inner.rstrip("/")).lstrip("/"))
            to.parent.mkdir(parents=True, exist_ok=True)
            files.get_file(file, str(to))
        yield target


@contextmanager
def outgoing(path: str | Path) -> Iterator[Path]:
    """Yield a local directory to write into: ``path`` itself, or a temporary one whose files are uploaded to the URL at the context's end."""
    if "://" not in str(path):
        yield Path(expanded(path))
        return
    files, inner = reach(str(path))
    if files.exists(inner) and files.find(inner):
        raise FileExistsError(f"{path} is not empty: choose another path")
    files.check_bucket(inner)
    with tempfile.TemporaryDirectory(prefix="outgoing-") as folder:
        yield Path(folder)
        files.makedirs(inner)
        for file in sorted(Path(folder).iterdir()):
            files.put_file(str(file), f"{inner.rstrip('/')}/{file.name}")


_UNFINISHED = Incomplete(f"{MANIFEST} is missing: a run is writing it, or was killed while it did", True)
OLD = timedelta(hours=1)
"""An incomplete checkpoint at a URL that has not changed for this long counts as left by a killed job."""


class RemoteStorage(Storage):
    """Storage at a URL, where nothing can be renamed: the manifest is sent last, and makes a checkpoint complete. Drafts and reads use local copies.

    Raises:
        ValueError: fsspec does not know the protocol, or the protocol's package is missing; the message says which.
    """

    shared = False

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self.files, self._inside = reach(self.root)
        self._serial, self._read_manifests = 0, set[str]()
        self._folder: Path | None = None

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    @property
    def _copies(self) -> Path:
        """A local directory for copies, which is deleted with this object."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="checkpoints-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def inner_path(self, name: str) -> str:
        """The path of a checkpoint, or of a file in one, within the URL's file system."""
        return f"{self._inside}/{name}"

    def begin(self, name: str, first: bool = True, folders: Sequence[str] = FOLDERS) -> RemoteDraft:
        if first and self.files.exists(self.inner_path(name)):
            if not self.has(name) and not self._is_leftover(name):
                raise FileExistsError(
                    f"{self.path(name)} exists and is not a checkpoint ({MANIFEST} is missing): choose another path"
                )
            self.delete(name)
        folder = Path(tempfile.mkdtemp(dir=self._copies))
        for subfolder in folders:
            (folder / subfolder).mkdir()
        return RemoteDraft(self, name, folder, first)

    def next_serial(self) -> int:
        """The serial number of the next checkpoint, from all manifests, since other writers may save here too."""
        self._serial = next_serial([self._serial, *self._new_serials()])
        return self._serial

    def _new_serials(self) -> list[int]:
        """The serial numbers in manifests that are new, or have changed, since the last call."""
        self.files.invalidate_cache(self._inside)
        try:
            entries = self.files.find(self._inside, maxdepth=2, detail=True)
        except FileNotFoundError:
            return []
        manifests = {str(entry): path for path, entry in entries.items() if path.endswith(f"/{MANIFEST}")}
        new = manifests.keys() - self._read_manifests
        self._read_manifests = set(manifests)
        serials: list[int] = []
        for path in (manifests[entry] for entry in new):
            with suppress(DamagedCheckpoint, OSError):
                serials.append(check_manifest(path, parse_json(path, self.files.cat_file(path)))["serial"])
        return serials

    def complete(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name in self._names():
            with suppress(DamagedCheckpoint, OSError):
                yield name, self._complete_manifest(name)

    def written_names(self) -> set[str]:
        return {name for name in self._names() if self.has(name)}

    def is_complete(self, name: str) -> bool:
        try:
            self._complete_manifest(name)
        except (DamagedCheckpoint, OSError):
            return False
        return True

    def incomplete(self, complete: Container[str] | None = None) -> dict[str, Incomplete]:
        problems: dict[str, Incomplete] = {}
        for name in self._names():
            if complete is not None and name in complete:
                continue
            try:
                self._complete_manifest(name)
            except FileNotFoundError:
                if self._is_leftover(name):
                    problems[name] = _UNFINISHED
            except (DamagedCheckpoint, OSError) as error:
                problems[name] = Incomplete(str(error).removeprefix(f"{self.path(name)}: "), False)
        return problems

    def has(self, name: str) -> bool:
        return bool(name) and self.files.exists(self.inner_path(f"{name}/{MANIFEST}"))

    def _complete_manifest(self, name: str) -> dict[str, Any]:
        """Do the same as :func:`engine.checkpoint.local_storage.read_manifest`, with the same errors."""
        text = self.files.cat_file(self.inner_path(f"{name}/{MANIFEST}"))
        manifest = check_manifest(self.path(name), parse_json(self.path(name), text))
        sizes = {path: entry["size"] for path, entry in self.files.find(self.inner_path(name), detail=True).items()}
        for file, record in manifest["files"].items():
            path = self.inner_path(f"{name}/{file}")
            size = sizes.get(path)
            if size is None and path in sizes:  # a web server's page has no sizes
                with suppress(FileNotFoundError):
                    size = self.files.size(path)
            if size != record["bytes"]:
                problem = (
                    "is missing" if size is None else f"has {size} bytes, and had {record['bytes']} when it was written"
                )
                raise DamagedCheckpoint(f"{self.path(name)}: {file} {problem}")
        return manifest

    def fetch(self, name: str) -> Path:
        target = self._copies / name
        manifest = self.manifest(name)
        if not (target / MANIFEST).exists() or read_manifest(target)["crc32"] != manifest["crc32"]:
            shutil.rmtree(target, ignore_errors=True)
            for file in [*manifest["files"], MANIFEST]:
                path = inside(target, file)
                path.parent.mkdir(parents=True, exist_ok=True)
                self.files.get_file(self.inner_path(f"{name}/{file}"), str(path))
        return target

    def remove(self, name: str) -> bool:
        check_entry(self.root, name)
        if not any(complete_name != name for complete_name, _ in self.complete()):
            return False
        with suppress(FileNotFoundError):
            self.files.rm_file(self.inner_path(f"{name}/{MANIFEST}"))
        self.delete(name)
        return True

    def must_stay(self, name: str) -> bool:
        try:
            self._complete_manifest(name)
        except FileNotFoundError:
            path = self.inner_path(name)
            return path in self.files.find(path)  # a file
        except DamagedCheckpoint:
            return True
        except OSError:  # no permission or no connection: a later call will report it
            with suppress(OSError):
                return name in self._names()
        return False

    def sweep(self) -> None:
        # There are no locks, so recent files may belong to another job and are kept.
        for name in self._names():
            if not self.has(name) and self._is_leftover(name) and self._age(name) > OLD:
                self.delete(name)

    def _age(self, name: str) -> timedelta:
        """The age of the checkpoint's newest file; 0, which never counts as old, if the storage has no times."""
        now, youngest = datetime.now(UTC), timedelta.max
        for entry in self.files.find(self.inner_path(name), detail=True).values():
            when = next(
                (entry[key] for key in ("LastModified", "mtime", "updated", "created") if entry.get(key) is not None),
                None,
            )
            if isinstance(when, (int, float)):
                when = datetime.fromtimestamp(when, UTC)
            if not isinstance(when, datetime):
                return timedelta()
            youngest = min(youngest, now - (when if when.tzinfo else when.replace(tzinfo=UTC)))
        return youngest

    def _names(self) -> list[str]:
        """The names of the folders that may be checkpoints."""
        try:
            entries = self.files.ls(self._inside, detail=True)
        except FileNotFoundError:
            return []
        names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]
        return [name for name in names if is_entry(name)]

    def _is_leftover(self, name: str) -> bool:
        """Whether a folder is what an unfinished save or removal has left: only checkpoints have files of these names."""
        paths = (
            path.removeprefix(self.inner_path(name)).strip("/").partition("/")
            for path in self.files.find(self.inner_path(name))
        )
        # Files of checkpoints inside the folder are deeper, and do not count.
        return any(
            subfolder == JOINED or (subfolder in FOLDERS and file.startswith("rank=")) for subfolder, _, file in paths
        )

    def manifest(self, name: str) -> dict[str, Any]:
        try:
            text = self.files.cat_file(self.inner_path(f"{name}/{MANIFEST}"))
        except FileNotFoundError as error:
            complete = ", ".join(self.manifests()) or "none"
            raise FileNotFoundError(
                f"{self.path(name)} holds no complete checkpoint ({MANIFEST} is missing); complete ones beside it: {complete}"
            ) from error
        return check_manifest(self.path(name), parse_json(self.path(name), text))

    def delete(self, name: str) -> None:
        """Delete the folder of this name, complete or not."""
        with suppress(FileNotFoundError):
            self.files.rm(self.inner_path(name), recursive=True)


class RemoteDraft(Draft):
    """A local directory with one rank's files, which the rank uploads. The upload becomes a checkpoint only with its manifest."""

    def __init__(self, storage: RemoteStorage, name: str, folder: Path, first: bool) -> None:
        self._storage, self._name, self._first = storage, name, first
        self._is_open = True
        self.folder = folder

    def send(self, files: Iterable[str]) -> None:
        for file in files:
            target = self._storage.inner_path(f"{self._name}/{file}")
            self._storage.files.makedirs(target.rpartition("/")[0])
            self._storage.files.put_file(str(self.folder / file), target)

    def seal(
        self,
        world_size: int,
        facts: Mapping[str, Any],
        files: Mapping[str, Record],
        trees: Mapping[str, Any] | None = None,
    ) -> None:
        storage, name = self._storage, self._name
        manifest = manifest_of(world_size, facts, files, storage.next_serial(), trees)
        for file, record in files.items():
            size = storage.files.size(storage.inner_path(f"{name}/{file}"))
            if size != record["bytes"]:
                raise OSError(
                    f"{storage.path(name)}/{file} has {size} bytes after sending, and {record['bytes']} were written"
                )
        storage.files.pipe_file(storage.inner_path(f"{name}/{MANIFEST}"), json_text(manifest))
        self._drop()

    def abandon(self) -> None:
        was_open = self._is_open
        self._drop()
        if self._first and was_open:
            with suppress(Exception):  # the error that led to this call is the one to report
                if not self._storage.has(self._name):
                    self._storage.delete(self._name)

    def _drop(self) -> None:
        self._is_open = False
        shutil.rmtree(self.folder, ignore_errors=True)
