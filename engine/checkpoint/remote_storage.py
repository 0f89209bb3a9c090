"""Checkpoints at a URL that fsspec knows."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from engine.checkpoint import directory
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
from engine.checkpoint.manifest import FOLDERS, JOINED, MANIFEST, age_of, check_manifest, manifest_of, next_serial
from engine.utils.text import has_password, terminal_text


class FileSystem:
    """The fsspec file system of a URL. Its methods are those of fsspec.

    Raises:
        FileNotFoundError: as fsspec.
        OSError: anything else that fsspec, or the library below it, raises: each has errors of its own, and many do not name the URL.
    """

    def __init__(self, url: str, files: Any) -> None:
        self._url, self._files = url, files

    def exists(self, path: str) -> bool:
        return bool(self._call(self._files.exists, path))

    def ls(self, path: str, detail: bool) -> list[Any]:
        return list(self._call(self._files.ls, path, detail=detail))

    def find(self, path: str, **options: Any) -> Any:
        return self._call(self._files.find, path, **options)

    def size(self, path: str) -> int | None:
        size: int | None = self._call(self._files.size, path)
        return size

    def cat_file(self, path: str) -> bytes:
        """The content of a JSON file.

        Raises:
            DamagedCheckpoint: it is larger than any that is written.
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
        self._call(self._files.makedirs, path, exist_ok=True)

    def rm(self, path: str, recursive: bool) -> None:
        self._call(self._files.rm, path, recursive=recursive)

    def rm_file(self, path: str) -> None:
        self._call(self._files.rm_file, path)

    def invalidate_cache(self, path: str) -> None:
        self._call(self._files.invalidate_cache, path)

    def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return method(*arguments, **options)
        except FileNotFoundError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            if signature := self._url.partition("?")[2]:
                said = said.replace(signature, "...")
            raise OSError(
                f"{terminal_text(without_query(self._url))}: {terminal_text(said, one_line=True)}. Check the URL, the network, and the access that "
                "fsspec was given"
            ) from error


def reach(url: str) -> tuple[FileSystem, str]:
    """The fsspec file system of a URL, and the path in it.

    Raises:
        ValueError: fsspec does not know the protocol, or its package is missing; or the URL has a password, which would stand in logs, records
            and pages.
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
        # Of a URL that lacks what its file system needs (github://x has no owner), fsspec raises whatever its constructor does.
        raise ValueError(f"{url}: {error}") from error
    return FileSystem(url, files), str(inner)


def without_query(path: str | Path) -> str:
    """A path, or a URL as it may be shown: what follows ``?`` may be a signature that lets everybody read."""
    return str(path).partition("?")[0] if "://" in str(path) else str(path)


_UNFINISHED = f"{MANIFEST} is missing: a run is writing it, or was killed while it did"


OLD = timedelta(hours=1)
"""An incomplete remote checkpoint that has not changed for so long was left by a killed job."""


class Remote:
    """Storage without rename: a checkpoint with a manifest is complete, and the manifest is sent last. Drafts and reads use local copies.

    Raises:
        ValueError: fsspec does not know the protocol, or its package is missing; the message says which.
    """

    shared = False

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self.files, self._inside = reach(self.root)
        self._drafts: dict[str, Path] = {}
        self._serial, self._known = 0, set[str]()
        self._folder: Path | None = None

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    @property
    def _copies(self) -> Path:
        """A local directory that is removed with this object."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="checkpoints-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def _at(self, name: str) -> str:
        return f"{self._inside}/{name}"

    def draft(self, name: str) -> Path:
        return self._drafts[name]

    def begin(self, name: str, first: bool, folders: Sequence[str] = FOLDERS) -> None:
        if first and self.files.exists(self._at(name)):
            if not self.files.exists(self._at(f"{name}/{MANIFEST}")) and not self._remains(name):
                raise FileExistsError(
                    f"{self.path(name)} exists and is not a checkpoint ({MANIFEST} is missing): choose another path"
                )
            self._delete(name)
        self._drafts[name] = Path(tempfile.mkdtemp(dir=self._copies))
        for folder in folders:
            (self._drafts[name] / folder).mkdir()

    def send(self, name: str, files: Iterable[str]) -> None:
        for file in files:
            target = self._at(f"{name}/{file}")
            self.files.makedirs(target.rpartition("/")[0])
            self.files.put_file(str(self._drafts[name] / file), target)

    def seal(
        self,
        name: str,
        world_size: int,
        facts: Mapping[str, Any],
        files: Mapping[str, Record],
        trees: Mapping[str, Any] | None = None,
    ) -> None:
        self._serial = next_serial([self._serial, *self._new_serials()])
        manifest = manifest_of(world_size, facts, files, self._serial, trees)
        for file, known in files.items():
            found = self.files.size(self._at(f"{name}/{file}"))
            if found != known["bytes"]:
                raise OSError(
                    f"{self.path(name)}/{file} has {found} bytes after sending, and {known['bytes']} were written"
                )
        self.files.pipe_file(self._at(f"{name}/{MANIFEST}"), json_text(manifest))
        self._drop(name)

    def _new_serials(self) -> list[int]:
        """The serial numbers in manifests that are new here, or have changed, since the last call: others may save here too."""
        self.files.invalidate_cache(self._inside)
        try:
            entries = self.files.find(self._inside, maxdepth=2, detail=True)
        except FileNotFoundError:
            return []
        there = {str(entry): path for path, entry in entries.items() if path.endswith(f"/{MANIFEST}")}
        new = there.keys() - self._known
        self._known = set(there)
        serials: list[int] = []
        for path in (there[entry] for entry in new):
            with suppress(DamagedCheckpoint, OSError):
                serials.append(check_manifest(path, parse_json(path, self.files.cat_file(path)))["serial"])
        return serials

    def abandon(self, name: str, first: bool) -> None:
        begun = name in self._drafts
        self._drop(name)
        if first and begun:
            with suppress(Exception):  # the error that led here is the one to report
                if not self.files.exists(self._at(f"{name}/{MANIFEST}")):
                    self._delete(name)

    def manifests(self) -> dict[str, dict[str, Any]]:
        found = [(age_of(manifest), name, manifest) for name, manifest in self.complete()]
        return {name: manifest for _, name, manifest in sorted(found, key=lambda entry: entry[:2])}

    def complete(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name in self._names():
            with suppress(DamagedCheckpoint, OSError):
                yield name, self._whole(name)

    def damaged(self, complete: Container[str] | None = None) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in self._names():
            if complete is not None and name in complete:
                continue
            try:
                self._whole(name)
            except FileNotFoundError:
                if self._remains(name):
                    found[name] = _UNFINISHED
            except (DamagedCheckpoint, OSError) as error:
                found[name] = str(error).removeprefix(f"{self.path(name)}: ")
        return found

    def unusable(self) -> dict[str, str]:
        return {name: why for name, why in self.damaged().items() if why != _UNFINISHED}

    def has_manifest(self, name: str) -> bool:
        """Whether it exists; it may be damaged."""
        return self.files.exists(self._at(f"{name}/{MANIFEST}"))

    def _whole(self, name: str) -> dict[str, Any]:
        """The manifest of a checkpoint whose files exist with the right sizes; errors as of :func:`store.read_manifest`."""
        text = self.files.cat_file(self._at(f"{name}/{MANIFEST}"))
        manifest = check_manifest(self.path(name), parse_json(self.path(name), text))
        sizes = {path: entry["size"] for path, entry in self.files.find(self._at(name), detail=True).items()}
        for file, known in manifest["files"].items():
            size = sizes.get(self._at(f"{name}/{file}"))
            if size != known["bytes"]:
                what = (
                    "is missing" if size is None else f"has {size} bytes, and had {known['bytes']} when it was written"
                )
                raise DamagedCheckpoint(f"{self.path(name)}: {file} {what}")
        return manifest

    def fetch(self, name: str) -> Path:
        target = self._copies / name
        manifest = self.manifest(name)
        if not (target / MANIFEST).exists() or directory.read_manifest(target)["crc32"] != manifest["crc32"]:
            shutil.rmtree(target, ignore_errors=True)
            for file in [*manifest["files"], MANIFEST]:
                path = inside(target, file)
                path.parent.mkdir(parents=True, exist_ok=True)
                self.files.get_file(self._at(f"{name}/{file}"), str(path))
        return target

    def remove(self, name: str) -> bool:
        check_entry(self.root, name)
        if not any(other != name for other, _ in self.complete()):
            return False
        with suppress(FileNotFoundError):
            self.files.rm_file(self._at(f"{name}/{MANIFEST}"))
        self._delete(name)
        return True

    def busy(self, name: str) -> bool:
        try:
            self._whole(name)
        except FileNotFoundError:
            return False
        except DamagedCheckpoint:
            return True
        except OSError:  # no permission, or the storage cannot be reached: later calls report it
            with suppress(OSError):
                return name in self._names()
        return False

    def sweep(self) -> None:
        # There are no locks: recent files may be another job's, and stay.
        for name in self._names():
            if not self.has_manifest(name) and self._remains(name) and self._age(name) > OLD:
                self._delete(name)

    def _age(self, name: str) -> timedelta:
        """The time of its newest file; ``None`` if the storage has no times."""
        now, youngest = datetime.now(UTC), timedelta.max
        for entry in self.files.find(self._at(name), detail=True).values():
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
        try:
            entries = self.files.ls(self._inside, detail=True)
        except FileNotFoundError:
            return []
        names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]
        return [name for name in names if is_entry(name)]

    def _remains(self, name: str) -> bool:
        """Whether these files belong to a checkpoint that was being written or removed: only checkpoints have files of such names."""
        found = (
            path.removeprefix(self._at(name)).strip("/").partition("/") for path in self.files.find(self._at(name))
        )
        return any(
            inner == JOINED or (inner in FOLDERS and file.startswith("rank=")) for inner, _, file in found
        )  # checkpoints in it do not count

    def manifest(self, name: str) -> dict[str, Any]:
        try:
            text = self.files.cat_file(self._at(f"{name}/{MANIFEST}"))
        except FileNotFoundError as error:
            there = ", ".join(self.manifests()) or "none"
            raise FileNotFoundError(
                f"{self.path(name)} holds no complete checkpoint ({MANIFEST} is missing); complete ones beside it: {there}"
            ) from error
        return check_manifest(self.path(name), parse_json(self.path(name), text))

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.files.rm(self._at(name), recursive=True)

    def _drop(self, name: str) -> None:
        if name in self._drafts:
            shutil.rmtree(self._drafts.pop(name), ignore_errors=True)
