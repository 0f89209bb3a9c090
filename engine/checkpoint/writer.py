"""Checkpoints written by all ranks together, while the training continues."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from torch import nn

from engine.checkpoint import manifest, other_weights, write_shares
from engine.checkpoint.files import DamagedCheckpoint, Record, encode_json, in_parallel, is_entry
from engine.checkpoint.host_copies import Staging
from engine.checkpoint.json_tree import pack
from engine.checkpoint.manifest import FOLDERS, JOINED, OTHER_WEIGHTS, RANK, SHARED, WEIGHTS, PackedFacts, packed_facts
from engine.checkpoint.model_state import _merged, split
from engine.checkpoint.storage import Draft, Packed
from engine.checkpoint.storage_paths import split_path, storage_of
from engine.checkpoint.tensors import is_cut
from engine.checkpoint.write_shares import Part
from engine.distributed.collectives import all_or_none, gather_json
from engine.distributed.group import Group
from engine.distributed.stop_agreement import Agreement
from engine.utils import device_copies
from engine.utils.log import logger
from engine.utils.parameters import parameters_of

CLOSE_S = 5.0
"""How long (s) a failed run of several ranks waits for a checkpoint in progress: the others wait for this rank's exit."""
KEEP_S = 30.0
"""How long (s) the copies of a save beside the training stay for the next one: a later save makes new ones, on its own thread."""
_open: weakref.WeakSet[Saver] = weakref.WeakSet()


@dataclass
class Content:
    """This rank's content of a checkpoint. Tensors may be whole or sharded (``DTensor``)."""

    model: Mapping[str, Any]
    """Parameters and buffers by name, and results of ``get_extra_state``; names of other ranks may be missing."""
    optim: Mapping[str, Any]
    """``{number: state}`` of each optimizer; ``state["state"]`` is keyed by parameter names; other ranks may have some of them."""
    shared: Any
    """A tree that is the same on all ranks."""
    own: Any
    """This rank's tree."""
    facts: Mapping[str, Any]
    """Additional facts for the manifest: small JSON values."""
    partial: bool = False
    """Whether ranks have tensors of different names; the same on all ranks."""
    stepped: Set[int] = frozenset()
    """The ``id`` of each parameter that only an optimizer step changes."""
    weights: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other weights of the model, which nothing changes before :meth:`Saver.hold`: ``{name: {name in the model: tensor}}``. The names of the
    weights are the same on all ranks."""


@dataclass
class _Job:
    """A checkpoint in progress. Nothing in it changes while the training continues, except for tensors that are still to be copied."""

    name: str
    parts: dict[str, Part]
    trees: dict[str, Packed]
    facts: PackedFacts
    remove: Sequence[str]
    staging: Staging | None
    joined: bool
    """The checkpoint has one file for all tensors, and the trees in its manifest."""
    future: Future[None] | None = None
    draft: Draft | None = None
    """The draft of this rank, once it has begun to write."""


class Saver:
    """Writes checkpoints of one job to one directory.

    Every rank writes its own shards; ranks share the writing of what several of them have. With ``asynchronous`` the caller waits only
    until copies have started: a thread finishes them (:meth:`hold`), writes, and syncs. One checkpoint is written at a time.

    Args:
        root: a directory, or a URL that fsspec knows.
    """

    def __init__(self, group: Group, root: str | Path) -> None:
        self.group, self.storage = group, storage_of(root)
        self.max_failures = 1
        """This many consecutive failures of asynchronous saves are an error; fewer are logged."""
        self.lost: set[str] = set()
        """Names of checkpoints that could not be written."""
        self.kept: set[str] = set()
        """Names that retention never removes: the one this run was resumed from, and those that were damaged then."""
        self.postponed: list[str] = []
        """Names that are still to be removed."""
        self.news: deque[tuple[str, str]] = deque()
        """On the main process, ``"saved"`` or ``"removed"`` and a checkpoint's name, in the order of these events; if there is an
        :attr:`agreement`, for somebody who takes them out."""
        self.agreement: Agreement | None = None
        """It is notified of news, perhaps by the writing thread."""
        self._failures = 0
        self._stuck: set[str] = set()
        self._job: _Job | None = None
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None  # takes jobs from the queue
        self._claimed = False  # the next save copies into the buffers: the thread does not free them
        self._lock = threading.Lock()
        self._side: Group | None = None
        self._staging: Staging | None = None
        self._rows: list[Any] | None = None
        self._swept = False
        self._mine: set[str] = set()

    def _tell(self, event: str, name: str) -> None:
        if self.agreement is not None:
            self.news.append((event, name))
            self.agreement.notify()

    # -- saving -----------------------------------------------------------------------------------------------------------------

    def save(
        self,
        name: str,
        content: Content,
        *,
        asynchronous: bool = False,
        tolerant: bool = False,
        remove: Sequence[str] = (),
        unchanging: bool = True,
    ) -> Path | str:
        """Write the checkpoint ``name``; all ranks call this together.

        Args:
            asynchronous: return when copies have started; :meth:`wait` reports errors.
            tolerant: treat a failed write as :meth:`wait` does.
            remove: checkpoints to delete once this one is complete.
            unchanging: parameters and optimizer states do not change until :meth:`hold`.

        Returns:
            Where it is, or will be.

        Raises:
            TypeError: a value cannot be stored; the message says where it is.
            OSError: (neither ``asynchronous`` nor ``tolerant``) the disk is full, a permission is missing, and the like.
            RankError: another rank failed; the message has its error. Then there is no new checkpoint, and the earlier ones are unchanged.
        """
        self.wait()
        job, later = self._prepare(name, content, remove)
        name = job.name
        self.lost.discard(name)
        if not asynchronous:
            try:
                self._write(job, self.group)
            except Exception as error:
                if not tolerant:
                    raise
                self._ended(name, error)
            return self.storage.path(name)
        self._write_beside(job, later if unchanging else set())
        return self.storage.path(name)

    def _write_beside(self, job: _Job, later: set[str]) -> None:
        """Write beside the training. ``later``: tensors that are copied by :meth:`hold` at the latest."""
        if self._side is None:
            # Collectives of another thread need their own process group.
            ranks = self.group.world_size
            self._side = self.group.part([list(range(ranks))]) if ranks > 1 else self.group
        if self.group.world_size > 1:
            # All of a process's savers share that group: its collectives come in one order on all ranks, one checkpoint after another.
            wait([saver._job.future for saver in _open if saver._job is not None and saver._job.future is not None])
        with self._lock:
            self._claimed = True
        if self._staging is None:
            self._staging = Staging(self.group.device)
        loose = {(stem, n): tensor for stem, (_, tensors) in job.trees.items() for n, tensor in tensors.items()}
        try:
            self._staging.begin({key: part.tensor for key, part in job.parts.items()} | loose, later)
        except BaseException:
            with self._lock:
                self._claimed = False
            raise
        job.staging = self._staging
        job.future, self._job = Future(), job
        _open.add(self)
        with self._lock:
            self._queue.put(job)
            if self._thread is None or not self._thread.is_alive():  # a fork leaves it behind
                # A daemon: a failing rank exits even when the thread waits for ranks that are gone.
                self._thread = threading.Thread(target=self._serve, args=(self._side,), name="checkpoint", daemon=True)
                self._thread.start()

    def hold(self) -> None:
        """Wait until tensors may change, because the checkpoint in progress has its copies."""
        if self._job is not None and self._job.staging is not None:
            self._job.staging.hold()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the checkpoint in progress.

        Raises:
            RuntimeError: this and the ``max_failures - 1`` previous ones could not be written.
            TimeoutError: it takes longer than ``timeout`` (s).
        """
        job, self._job = self._job, None
        if job is not None and job.future is not None:
            error = job.future.exception(timeout)
            if error is None and job.staging is not None:
                job.staging.hold()  # memory that is freed from here on is used again after its copy, on the device too
            self._ended(job.name, error)
        self.remove([])

    def _ended(self, name: str, error: BaseException | None) -> None:
        if error is None:
            self._failures = 0
            return
        self._failures += 1
        self.lost.add(name)
        message = f"checkpoint {name} was not written: {type(error).__name__}: {error}"
        if self._failures >= self.max_failures:
            raise RuntimeError(
                f"{message} ({self._failures} failure(s) in a row). Earlier checkpoints are unchanged"
            ) from error
        if self.group.is_main:
            logger.error(
                "%s; training continues (failure %d in a row, %d are an error)",
                message,
                self._failures,
                self.max_failures,
            )

    def close(self, failed: bool = False) -> None:
        """Wait for the checkpoint in progress, and free the buffers.

        Args:
            failed: the run ended with an error, and other ranks may be gone: wait only briefly, and raise nothing.
        """
        try:
            self.wait(CLOSE_S if failed and self.group.world_size > 1 else None)
        except Exception as error:
            if not failed:
                raise
            logger.error("the checkpoint in progress was abandoned: %s: %s", type(error).__name__, error)
            self._staging = None  # the thread still reads it
        with self._lock:
            if self._thread is not None:
                self._queue.put(None)
                self._thread = None
        if self._staging is not None:
            self._staging.close()
        self._staging = self._rows = None

    def discard(self, names: Sequence[str]) -> None:
        """Delete checkpoints (on the main process) when the one in progress is complete."""
        if self.group.is_main:
            self.postponed += names

    def take_over(self, postponed: Any, path: Path | str) -> None:
        """Take :attr:`postponed` from the checkpoint at ``path``, from which this job resumes.

        A name counts only for an older checkpoint in this job's own directory: elsewhere, or for a newer one, it means something else.

        Raises:
            DamagedCheckpoint: ``postponed`` is not a list of names.
        """
        if not isinstance(postponed, list) or not all(map(is_entry, postponed)):
            raise DamagedCheckpoint(f"{path}: {SHARED}.json has no usable 'postponed': {postponed!r:.100}")
        storage, name = split_path(path)
        if self.group.is_main and storage.is_same(self.storage):
            self.storage.sweep()  # also before the first save: there may be nothing left to save
            there = list(self.storage.manifests())
            self.postponed = [each for each in there[: there.index(name)] if each in postponed] if name in there else []

    def remove(self, names: Sequence[str]) -> None:
        """Delete checkpoints (on the main process); those that are in use, or that an error keeps, are tried again later."""
        if self.group.is_main and (names or self.postponed):
            wanted, self.postponed = [*self.postponed, *names], []
            self.postponed += [name for name in dict.fromkeys(wanted) if name in self.kept or not self._remove(name)]

    def _remove(self, name: str) -> bool:
        try:
            gone = self.storage.remove(name)
        except Exception as error:  # not a reason to give up the checkpoint that is being written; remote ones have errors of their own
            gives_up = isinstance(error, ValueError)
            again = "" if gives_up else " (tried again after each save)"
            if name not in self._stuck:
                logger.warning("checkpoint %s could not be removed: %s: %s%s", name, type(error).__name__, error, again)
            self._stuck.add(name)
            return gives_up
        self._stuck.discard(name)
        if gone:
            self._tell("removed", name)
        return gone

    def _free(self, name: str) -> str:
        """The name, numbered if a checkpoint of this name must stay: it is being read, resumed from, to be removed, or unreadable."""
        found, number = name, 0
        while found in self.kept or found in self.postponed or self.storage.must_stay(found):
            number += 1
            found = f"{name}-v{number}"
        if number:
            logger.warning(
                "%s must stay: it is in use, or cannot be read; this checkpoint becomes %s",
                self.storage.path(name),
                found,
            )
        return found

    def _prepare(self, name: str, content: Content, remove: Sequence[str]) -> tuple[_Job, set[str]]:
        """Everything that must happen while nothing changes. The ranks agree that it can be stored, and on who writes what.

        Returns:
            The job, and the names of its tensors that only an optimizer step changes.
        """
        facts = PackedFacts()
        parts: dict[str, Part] = {}
        trees: dict[str, Packed] = {}
        later: set[str] = set()
        rows: list[Any] = []

        def work() -> list[Any]:
            facts.update(packed_facts(content.facts))
            tensors, model = split(content.model)
            optim, states = pack(dict(content.optim), is_cut)
            trees.update(
                {
                    "model/model": (model, {}),
                    "optim/optim": (optim, {}),
                    RANK.format(self.group.rank): pack(content.own),
                }
            )
            if self.group.is_main:
                trees[SHARED] = pack(content.shared)
            others, named = other_weights.packed(content.weights)
            if content.weights:
                trees[OTHER_WEIGHTS] = (named, {})
            own = {f"model/{n}": t for n, t in tensors.items()} | {f"optim/{n}": t for n, t in states.items()}
            parts.update(write_shares.parts_of(own | others))
            trained = (f"model/{n}" for n, t in tensors.items() if id(t) in content.stepped)
            later.update({f"optim/{n}" for n in states}, trained, others)
            # Where ranks may have different values, such as batch statistics, rank 0's are saved.
            varying = {n for n, t in tensors.items() if not isinstance(t, nn.Parameter)}
            fixed = {f"model/{n}" for n in varying} | {key for key in others if key.split("/", 2)[2] in varying}
            rows.extend((name, offsets, size, name in fixed) for name, offsets, size in write_shares.rows(parts))
            return [rows == self._rows, self._free(name) if self.group.is_main else None]

        answers = all_or_none(self.group, work)
        name = answers[0][1]
        if not all(same for same, _ in answers):
            self._mine, self._rows = write_shares.deal(gather_json(self.group, rows), self.group.rank), rows
        stems = ("model/model", "optim/optim", *([OTHER_WEIGHTS] if content.weights else ()))
        joined = {stem: trees.pop(stem)[0] for stem in stems}
        every = gather_json(self.group, joined) if content.partial else [joined]
        if self.group.is_main:
            trees |= {stem: (_merged([row[stem] for row in every]), {}) for stem in joined}
        mine = {key: part for key, part in parts.items() if key in self._mine}
        small = self.group.world_size == 1 and _is_small(mine, trees)
        return _Job(name, mine, trees, facts, list(remove), None, small), later

    # -- on the writing thread ----------------------------------------------------------------------------------------------

    def _serve(self, group: Group) -> None:
        """Write the jobs of the queue; free the buffers and end when no job has come for :data:`KEEP_S`."""
        while True:
            try:
                job = self._queue.get(timeout=KEEP_S)
            except Empty:
                with self._lock:
                    if self._claimed:
                        continue
                    self._thread = None
                    if self._staging is not None:
                        self._staging.close()
                    return
            if job is None:
                return
            self._run(job, group)
            del job

    def _run(self, job: _Job, group: Group) -> None:
        assert job.future is not None
        with self._lock:
            self._claimed = False
        future = job.future
        try:
            device_copies.on(group.device, partial(self._write, job, group))
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        job.parts, job.trees = {}, {}

    def _write(self, job: _Job, group: Group) -> None:
        try:
            all_or_none(group, partial(self._begin, job, group))
            files = all_or_none(group, partial(self._fill, job, group))
            all_or_none(group, lambda: self._seal(job, group, files) if group.is_main else None)
        except BaseException:
            if job.draft is not None:
                job.draft.abandon()
            raise
        if job.remove or self.postponed:
            self.remove(job.remove)

    def _begin(self, job: _Job, group: Group) -> None:
        if job.staging is not None:  # first: the training may be waiting for it
            copies = job.staging.finish()
            job.parts = {key: Part(copies[key], part.offsets) for key, part in job.parts.items()}
            job.trees = {s: (value, {n: copies[s, n] for n in found}) for s, (value, found) in job.trees.items()}
        if group.is_main:
            if not self._swept:
                self._swept = True
                self.storage.sweep()
            job.draft = self.storage.begin(job.name, folders=() if job.joined else FOLDERS)

    def _fill(self, job: _Job, group: Group) -> dict[str, Record]:
        draft = job.draft
        if draft is None:
            draft = job.draft = self.storage.begin(job.name, first=False)
        if job.joined:
            tensors = {key: part.tensor for key, part in job.parts.items()}
            tensors |= {
                f"{stem}/{n}": tensor
                for stem, (_, its_tensors) in job.trees.items()
                for n, tensor in its_tensors.items()
            }
            files = draft.write_tensors(JOINED, tensors) if tensors else {}
        else:
            files = self._fill_folders(job, group, draft)
        if job.staging is not None:
            job.staging.check(last=True)
        draft.send(files)
        return files

    def _fill_folders(self, job: _Job, group: Group, draft: Draft) -> dict[str, Record]:
        rank = group.rank
        works: list[Callable[[], dict[str, Record]]] = []
        for kind in ("optim", "model", WEIGHTS):
            own = {key.partition("/")[2]: part for key, part in job.parts.items() if key.startswith(f"{kind}/")}
            if kind == WEIGHTS and (own or OTHER_WEIGHTS in job.trees):
                (draft.folder / kind).mkdir(exist_ok=True)
            for index, some in enumerate(write_shares.divide(own)):
                name = f"{kind}/rank={rank:05d}{f'-{index}' if index else ''}.safetensors"
                works.append(partial(_tensors, draft, name, some))
        works += [partial(draft.write_tree, stem, tree) for stem, tree in job.trees.items()]
        write = partial(device_copies.on, group.device)  # a blocking save's tensors are on it
        size = sum(part.tensor.nbytes for part in job.parts.values())
        return {name: known for found in in_parallel(write, works, size) for name, known in found.items()}

    def _seal(self, job: _Job, group: Group, files: list[dict[str, Record]]) -> None:
        assert job.draft is not None
        job.draft.seal(
            group.world_size,
            job.facts,
            {name: known for own in files for name, known in own.items()},
            {stem: value for stem, (value, _) in job.trees.items()} if job.joined else None,
        )
        self._tell("saved", job.name)


def _finish() -> None:
    """At the interpreter's exit: complete checkpoints in progress."""
    for saver in list(_open):
        saver.close(failed=saver.group.failed or getattr(sys, "last_value", None) is not None)


atexit.register(_finish)


def _is_small(parts: Mapping[str, Part], trees: Mapping[str, Packed]) -> bool:
    """Check whether a checkpoint is small enough for the joined form."""
    size = sum(part.tensor.nbytes for part in parts.values())
    size += sum(tensor.nbytes for _, tensors in trees.values() for tensor in tensors.values())
    if size > manifest.JOINED_BYTES:
        return False
    texts = 0
    for value, _ in trees.values():
        texts += len(encode_json(value))
        if texts > manifest.JOINED_TREES:
            return False
    return True


def stepped(optimizers: Sequence[Any]) -> set[int]:
    """The ``id`` of each parameter that an optimizer trains. Others, such as a teacher's, may change at any time."""
    return {id(p) for p in parameters_of(optimizers) if p.requires_grad}


def _tensors(draft: Draft, name: str, parts: Mapping[str, Part]) -> dict[str, Record]:
    tensors = {key: part.tensor for key, part in parts.items()}
    return draft.write_tensors(name, tensors, {key: part.offsets for key, part in parts.items()})
