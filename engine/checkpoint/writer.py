"""Checkpoints written by all ranks together, while the training goes on."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from engine.checkpoint import write_shares
from engine.checkpoint.directory import RANK, SHARED, write_tree
from engine.checkpoint.files import DamagedCheckpoint, Record, in_parallel, is_entry
from engine.checkpoint.host_copies import Staging
from engine.checkpoint.json_tree import pack
from engine.checkpoint.manifest import packed_facts
from engine.checkpoint.model_state import _merged, split
from engine.checkpoint.storage import place, same
from engine.checkpoint.storage import split as place_of
from engine.checkpoint.tensors import write_tensors
from engine.checkpoint.write_shares import Part
from engine.distributed.all_or_none import together
from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.utils.log import logger
from engine.utils.parameters import parameters_of

CLOSE_S = 5.0
"""How long a run of several ranks that has failed waits for a checkpoint that was on its way (s): the others wait for this rank's end."""
_open: weakref.WeakSet[Saver] = weakref.WeakSet()

Packed = tuple[Any, dict[str, Tensor]]


@dataclass
class Content:
    """What goes into a checkpoint, as this rank has it. Tensors may be whole, or parts (``DTensor``)."""

    model: Mapping[str, Any]
    """Parameters and buffers by name, and what ``get_extra_state`` gave; names may be missing that other ranks hold."""
    optim: Mapping[str, Any]
    """``{number: state}`` of each optimizer; ``state["state"]`` is by names of parameters, some of which other ranks may hold."""
    shared: Any
    """A tree that is the same on all ranks."""
    own: Any
    """This rank's tree."""
    facts: Mapping[str, Any]
    """What the manifest says besides: small JSON values."""
    partial: bool = False
    """Ranks hold tensors of other names; the same on all ranks."""
    stepped: Set[int] = frozenset()
    """The ``id`` of each parameter that nothing but an optimizer step changes."""


@dataclass
class _Job:
    """A checkpoint on its way. Nothing in it changes while the training goes on, but for tensors that are still to be copied."""

    name: str
    parts: dict[str, Part]
    trees: dict[str, Packed]
    facts: Mapping[str, Any]
    remove: Sequence[str]
    staging: Staging | None
    future: Future[None] | None = None


class Saver:
    """Writes checkpoints of one job to one place.

    Every rank writes its own parts; of what several ranks hold, each writes about the same amount. With ``asynchronous`` the caller waits
    only until copies are begun: a thread finishes them (:meth:`hold`), writes, and syncs. One checkpoint is written at a time.

    Args:
        root: a directory, or a URL that fsspec knows.
    """

    def __init__(self, group: Group, root: str | Path) -> None:
        self.group, self.place = group, place(root)
        self.max_failures = 1
        """So many failures of asynchronous saves in a row are an error; fewer are logged."""
        self.lost: set[str] = set()
        """Names of checkpoints that could not be written."""
        self.kept: set[str] = set()
        """Names that are not removed whatever retention says: what this run was resumed from, and what was found damaged then."""
        self.postponed: list[str] = []
        """Names that are to be removed and could not be yet."""
        self._failures = 0
        self._job: _Job | None = None
        self._side: Group | None = None
        self._staging: Staging | None = None
        self._rows: list[Any] | None = None
        self._swept = False
        self._mine: set[str] = set()

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
            asynchronous: return when copies are begun; errors are found by :meth:`wait`.
            tolerant: a failure to write is treated as :meth:`wait` does.
            remove: checkpoints that are no longer wanted once this one is complete.
            unchanging: until :meth:`hold`, nobody changes parameters and optimizer states.

        Returns:
            Where it is, or will be.

        Raises:
            TypeError: something that cannot be stored; the message has its place.
            OSError: (neither ``asynchronous`` nor ``tolerant``) the disk is full, a permission is missing, and the like.
            RankError: another rank failed; the message has its error. No rank has the new checkpoint then, and the earlier ones are as they were.
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
            return self.place.path(name)
        if self._side is None:
            # Collectives of another thread need a process group of their own.
            self._side = self.group.part([list(range(self.group.world_size))]) if self.group.world_size > 1 else self.group
        if self._staging is None:
            self._staging = Staging(self.group.device)
        copies = self._staging.begin({key: part.tensor for key, part in job.parts.items()}, later if unchanging else set())
        job.parts = {key: Part(copies[key], part.offsets) for key, part in job.parts.items()}
        job.trees = {stem: (value, {n: t.detach().cpu().clone() for n, t in tensors.items()}) for stem, (value, tensors) in job.trees.items()}
        job.staging = self._staging
        job.future, self._job = Future(), job
        _open.add(self)
        # Nobody waits for a daemon: a rank that fails ends, even when the thread waits for ranks that are gone.
        threading.Thread(target=self._run, args=(job, job.future, self._side), name="checkpoint", daemon=True).start()
        return self.place.path(name)

    def hold(self) -> None:
        """Wait until tensors may change: the copies of the checkpoint on its way are made."""
        if self._job is not None and self._job.staging is not None:
            self._job.staging.hold()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the checkpoint on its way.

        Raises:
            RuntimeError: it could not be written, nor ``max_failures - 1`` before it.
            TimeoutError: it takes longer than ``timeout`` (s).
        """
        job, self._job = self._job, None
        if job is not None and job.future is not None:
            self._ended(job.name, job.future.exception(timeout))
        self.remove([])

    def _ended(self, name: str, error: BaseException | None) -> None:
        if error is None:
            self._failures = 0
            return
        self._failures += 1
        self.lost.add(name)
        message = f"checkpoint {name} was not written: {type(error).__name__}: {error}"
        if self._failures >= self.max_failures:
            raise RuntimeError(f"{message} ({self._failures} failure(s) in a row). Earlier checkpoints are as they were") from error
        if self.group.is_main:
            logger.error("%s; training goes on (failure %d in a row, %d are an error)", message, self._failures, self.max_failures)

    def close(self, failed: bool = False) -> None:
        """Wait for the checkpoint on its way, and give the buffers' memory back.

        Args:
            failed: the run has ended with an error, and other ranks may be gone: wait a little only, and raise nothing.
        """
        try:
            self.wait(CLOSE_S if failed and self.group.world_size > 1 else None)
        except Exception as error:
            if not failed:
                raise
            logger.error("the checkpoint on its way was given up: %s: %s", type(error).__name__, error)
        self._staging = self._rows = None

    def discard(self, names: Sequence[str]) -> None:
        """Delete checkpoints (on the main process) when the one on its way is complete."""
        if self.group.is_main:
            self.postponed += names

    def take_over(self, postponed: Any, path: Path | str) -> None:
        """What the checkpoint at ``path``, from which this job goes on, says of :attr:`postponed`.

        A name counts only for an older checkpoint in this job's own place: elsewhere, and of a newer one, it is that of something else.

        Raises:
            DamagedCheckpoint: ``postponed`` is not a list of names.
        """
        if not isinstance(postponed, list) or not all(map(is_entry, postponed)):
            raise DamagedCheckpoint(f"{path}: {SHARED}.json has no usable 'postponed': {postponed!r:.100}")
        where, name = place_of(path)
        if self.group.is_main and same(where, self.place):
            self.place.sweep()  # before the first save, too: there may be nothing left to save
            there = list(self.place.manifests())
            self.postponed = [each for each in there[: there.index(name)] if each in postponed] if name in there else []

    def remove(self, names: Sequence[str]) -> None:
        """Delete checkpoints (on the main process); one that is in use is tried again later."""
        if self.group.is_main and (names or self.postponed):
            wanted, self.postponed = [*self.postponed, *names], []
            self.postponed += [name for name in dict.fromkeys(wanted) if name in self.kept or not self._remove(name)]

    def _remove(self, name: str) -> bool:
        try:
            return self.place.remove(name)
        except (OSError, ValueError) as error:  # it is no reason to give up what is being written
            logger.warning("checkpoint %s could not be removed: %s: %s", name, type(error).__name__, error)
            return True

    def _free(self, name: str) -> str:
        """The name itself, or with a number where a checkpoint of that name must stay: it is read, resumed from, to be removed, or not readable."""
        found, number = name, 0
        while found in self.kept or found in self.postponed or self.place.busy(found):
            number += 1
            found = f"{name}-v{number}"
        if number:
            logger.warning("%s must stay: it is in use, or cannot be read; this checkpoint is %s", self.place.path(name), found)
        return found

    def _prepare(self, name: str, content: Content, remove: Sequence[str]) -> tuple[_Job, set[str]]:
        """All that must be done while nothing changes. The ranks agree that it can be stored, and who writes what.

        Returns:
            The job, and the names of those of its tensors that only an optimizer step changes.
        """
        parts: dict[str, Part] = {}
        trees: dict[str, Packed] = {}
        later: set[str] = set()
        rows: list[Any] = []

        def work() -> list[Any]:
            tensors, model = split(content.model)
            optim, states = pack(dict(content.optim), write_shares.is_cut)
            packed_facts(content.facts)
            trees.update({"model/model": (model, {}), "optim/optim": (optim, {}), RANK.format(self.group.rank): pack(content.own)})
            if self.group.is_main:
                trees[SHARED] = pack(content.shared)
            parts.update(write_shares.parts_of({f"model/{n}": t for n, t in tensors.items()} | {f"optim/{n}": t for n, t in states.items()}))
            later.update({f"optim/{n}" for n in states}, (f"model/{n}" for n, t in tensors.items() if id(t) in content.stepped))
            # What ranks may hold in different versions, such as the statistics of batches, is rank 0's.
            fixed = {f"model/{n}" for n, t in tensors.items() if not isinstance(t, nn.Parameter)}
            rows.extend((name, offsets, size, name in fixed) for name, offsets, size in write_shares.rows(parts))
            return [rows == self._rows, self._free(name) if self.group.is_main else None]

        answers = together(self.group, work)
        name = answers[0][1]
        if not all(same for same, _ in answers):
            self._mine, self._rows = write_shares.deal(gather_json(self.group, rows), self.group.rank), rows
        joined = {stem: trees.pop(stem)[0] for stem in ("model/model", "optim/optim")}
        every = gather_json(self.group, joined) if content.partial else [joined]
        if self.group.is_main:
            trees |= {stem: (_merged([row[stem] for row in every]), {}) for stem in joined}
        return _Job(name, {key: part for key, part in parts.items() if key in self._mine}, trees, content.facts, list(remove), None), later

    # -- on the thread that writes ----------------------------------------------------------------------------------------------

    def _run(self, job: _Job, future: Future[None], group: Group) -> None:
        try:
            self._write(job, group)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def _write(self, job: _Job, group: Group) -> None:
        try:
            together(group, partial(self._begin, job, group))
            files = together(group, partial(self._fill, job, group))
            together(group, lambda: self._seal(job, group, files) if group.is_main else None)
        except BaseException:
            self.place.abandon(job.name, group.is_main)
            raise
        if job.remove or self.postponed:
            self.remove(job.remove)

    def _begin(self, job: _Job, group: Group) -> None:
        if job.staging is not None:
            job.staging.finish()  # first of all: the training may be waiting for it
        if group.is_main:
            if not self._swept:
                self._swept = True
                self.place.sweep()
            self.place.begin(job.name, True)

    def _fill(self, job: _Job, group: Group) -> dict[str, Record]:
        if not group.is_main:
            self.place.begin(job.name, False)
        folder, rank = self.place.draft(job.name), group.rank
        works: list[Callable[[], dict[str, Record]]] = []
        for kind in ("optim", "model"):
            own = {key.partition("/")[2]: part for key, part in job.parts.items() if key.startswith(f"{kind}/")}
            for index, some in enumerate(write_shares.divide(own)):
                name = f"{kind}/rank={rank:05d}.safetensors" if not index else f"{kind}/rank={rank:05d}-{index}.safetensors"
                works.append(partial(_tensors, folder, name, some))
        works += [partial(write_tree, folder, stem, tree) for stem, tree in job.trees.items()]
        files = {name: known for found in in_parallel(lambda work: work(), works) for name, known in found.items()}
        self.place.send(job.name, files)
        return files

    def _seal(self, job: _Job, group: Group, files: list[dict[str, Record]]) -> None:
        self.place.seal(job.name, group.world_size, job.facts, {name: known for own in files for name, known in own.items()})


def _finish() -> None:
    """At the interpreter's exit: checkpoints on their way are completed."""
    for saver in list(_open):
        saver.close(failed=saver.group.failed or getattr(sys, "last_value", None) is not None)


atexit.register(_finish)


def stepped(optimizers: Sequence[Any]) -> set[int]:
    """The ``id`` of each parameter that an optimizer trains. Others, a teacher's for example, may be changed at any time."""
    return {id(p) for p in parameters_of(optimizers) if p.requires_grad}


def _tensors(folder: Path, name: str, parts: Mapping[str, Part]) -> dict[str, Record]:
    tensors = {key: part.tensor for key, part in parts.items()}
    return {name: write_tensors(folder / name, tensors, {key: part.offsets for key, part in parts.items()})}


