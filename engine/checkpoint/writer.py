"""Write checkpoints, on all ranks together and while the training continues."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from engine.checkpoint import manifest
from engine.checkpoint.content import Content, PackedContent, Part, Row, assign, into_files
from engine.checkpoint.files import Record, encode_json, in_parallel
from engine.checkpoint.manifest import FOLDERS, JOINED, OTHER_WEIGHTS, WEIGHTS, PackedFacts
from engine.checkpoint.retention import CheckpointFolder
from engine.checkpoint.staging import Staging
from engine.checkpoint.storage import Draft, Packed
from engine.distributed import failures
from engine.distributed.agreement import Compared
from engine.distributed.collectives import all_or_none, gather_json
from engine.distributed.group import Group
from engine.utils import device_copies
from engine.utils.helper_threads import log_failure
from engine.utils.log import logger

CLOSE_S = 5.0
"""Seconds that a failed run of several ranks waits for a checkpoint in progress, while the other ranks wait for this one's exit."""
KEEP_S = 30.0
"""Seconds that the writing thread and the buffers of an asynchronous save are kept for the next save."""
_open: weakref.WeakSet[CheckpointWriter] = weakref.WeakSet()
"""The writers of this process that have saved asynchronously."""


@dataclass(frozen=True)
class SaveRequest:
    """The options of one save; see the arguments of :meth:`engine.Run.save_checkpoint`."""

    name: str
    """The name of the checkpoint folder."""
    score: Mapping[str, Any] | None = None
    """``{"monitor": name, "mode": "min", "value": number}``, which the content's facts have too; ``None``: no score."""
    asynchronous: bool = False
    """Return when copies have started; :meth:`CheckpointWriter.wait` reports errors."""
    tolerant: bool = False
    """Count a failed write as :meth:`CheckpointWriter.wait` does, rather than raise its error."""
    remove: Sequence[str] = ()
    """Names of checkpoints in the same folder to delete once this one is complete."""


@dataclass
class _Job:
    """A checkpoint in progress. Its content does not change while the training continues, except for tensors that are not copied yet."""

    folder: CheckpointFolder
    name: str
    parts: dict[str, Part]
    """The parts that this rank writes."""
    trees: dict[str, Packed]
    facts: PackedFacts
    remove: Sequence[str]
    joined: bool
    """Whether the checkpoint is joined: all tensors in one file, and the trees in the manifest."""
    staging: Staging | None = None
    future: Future[None] | None = None
    draft: Draft | None = None
    """This rank's draft, once it has begun to write."""


class CheckpointWriter:
    """Writes the checkpoints of one engine, one at a time: those of a run, and those of :meth:`engine.Engine.save_state`.

    Every rank writes its own shards; ranks divide the writing of what several of them hold. With ``asynchronous`` the caller waits only
    until copies have started: a thread finishes them (see :meth:`hold`), writes, and syncs.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.compared: Compared | None = None
        """State that the ranks compare before each save, in the exchange that a save makes anyway."""
        self._job: _Job | None = None
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None  # writes the jobs of the queue
        self._needs_buffers = False  # a save is about to copy into the buffers: the thread must not free them
        self._lock = threading.Lock()
        self._thread_group: Group | None = None
        self._staging: Staging | None = None
        self._rows: list[Row] | None = None
        self._own_names: set[str] = set()

    # -- saving -----------------------------------------------------------------------------------------------------------------

    def save(self, folder: CheckpointFolder, content: Content, request: SaveRequest) -> Path | str:
        """Write ``content`` as a checkpoint in ``folder``; all ranks call this together.

        Returns:
            The path or URL of the checkpoint.

        Raises:
            TypeError: a value cannot be stored; the message says where it is.
            OSError: the disk is full, a permission is missing, and the like; not if the request is asynchronous or tolerant.
            RankError: another rank failed; the message has its error. There is no new checkpoint then, and earlier ones are unchanged.
            CheckError: ranks differ in :attr:`compared`.
        """
        self.wait(folder)
        job, late = self._prepare(folder, content, request)
        folder.lost.discard(job.name)
        if request.asynchronous:
            self._write_in_thread(job, late)
            return folder.storage.path(job.name)
        try:
            self._write(job, self.group)
        except Exception as error:
            if not request.tolerant:
                raise
            folder.ended(job.name, error)
            folder.raise_error()
        return folder.storage.path(job.name)

    def _write_in_thread(self, job: _Job, late: set[str]) -> None:
        """Hand the job to the writing thread. ``late``: names of tensors that need not be copied before :meth:`hold`."""
        if self._thread_group is None:
            # The collectives of another thread need a process group of their own.
            ranks = self.group.world_size
            self._thread_group = self.group.part([list(range(ranks))]) if ranks > 1 else self.group
        if self.group.world_size > 1:
            # All writers of a process share that group. One checkpoint after another, so that all ranks run its collectives in the same order.
            jobs = [writer._job for writer in _open]
            wait([earlier.future for earlier in jobs if earlier is not None and earlier.future is not None])
        with self._lock:
            self._needs_buffers = True
        if self._staging is None:
            self._staging = Staging(self.group.device)
        tree_tensors = {(stem, n): tensor for stem, (_, tensors) in job.trees.items() for n, tensor in tensors.items()}
        try:
            self._staging.start({key: part.tensor for key, part in job.parts.items()} | tree_tensors, late)
        except BaseException:
            with self._lock:
                self._needs_buffers = False
            raise
        job.staging = self._staging
        job.future, self._job = Future(), job
        _open.add(self)
        with self._lock:
            self._queue.put(job)
            if self._thread is None or not self._thread.is_alive():  # not alive in a forked process
                # A daemon thread, so that a failing rank can exit while the thread waits for ranks that are gone.
                self._thread = threading.Thread(
                    target=self._serve, args=(self._thread_group,), name="checkpoint", daemon=True
                )
                self._thread.start()

    def wait(self, folder: CheckpointFolder, timeout: float | None = None) -> None:
        """Wait for the checkpoint in progress, in any folder, and delete the checkpoints whose removal from ``folder`` is pending.

        Raises:
            RuntimeError: the latest ``max_failures`` checkpoints of ``folder`` could not be written.
            TimeoutError: the checkpoint takes longer than ``timeout`` (s).
        """
        job, self._job = self._job, None
        if job is not None and job.future is not None:
            error = job.future.exception(timeout)
            if error is None and job.staging is not None:
                job.staging.hold()  # on the device, too, memory that is freed from here on is reused only after its copy
            job.folder.ended(job.name, error)
            if job.folder is not folder:
                job.folder.log_error()
        folder.raise_error()
        folder.remove()

    def close(self, folder: CheckpointFolder, failed: bool = False) -> None:
        """Wait for the checkpoint in progress, as :meth:`wait` does, and free the buffers; a later save allocates new ones.

        Args:
            failed: the run has ended with an error, and other ranks may be gone: wait only briefly, and log errors.
        """
        try:
            self.wait(folder, CLOSE_S if failed and self.group.world_size > 1 else None)
        except Exception as error:
            if not failed:
                raise
            logger.error("the checkpoint in progress was abandoned: %s", failures.end_of_message(error))
            self._staging = None  # not freed here: the thread still reads it
        with self._lock:
            if self._thread is not None:
                self._queue.put(None)
                self._thread = None
        if self._staging is not None:
            self._staging.close()
        self._staging = self._rows = None

    def _prepare(self, folder: CheckpointFolder, content: Content, request: SaveRequest) -> tuple[_Job, set[str]]:
        """Do all that must happen before the training continues: the ranks agree that everything can be stored, and on who writes what.

        Returns:
            The job, and the names of its tensors that only an optimizer step changes.
        """
        packed = PackedContent(self.group)

        def work() -> list[Any]:
            packed.pack(content)
            name = folder.free_name(request.name) if self.group.is_main else None
            numbers = [] if self.compared is None else [*self.compared.numbers(), self.compared.values()]
            return [packed.rows == self._rows, name, numbers]

        answers = all_or_none(self.group, work)
        if self.compared is not None:
            rows = [numbers for *_, numbers in answers]
            if any(row[:-1] != rows[0][:-1] for row in rows):
                self.compared.compare()
            if any(row[-1] != rows[0][-1] for row in rows):
                self.compared.warn_of_values()
        if not all(is_unchanged for is_unchanged, *_ in answers):
            self._own_names, self._rows = assign(gather_json(self.group, packed.rows), self.group.rank), packed.rows
        packed.merge_trees()
        own_parts = {key: part for key, part in packed.parts.items() if key in self._own_names}
        joined = self.group.world_size == 1 and _is_small(own_parts, packed.trees)
        job = _Job(folder, answers[0][1], own_parts, packed.trees, packed.facts, list(request.remove), joined)
        return job, packed.late

    # -- who may change weights while they are copied -----------------------------------------------------------------------

    def hold(self) -> None:
        """Wait until tensors may change, because the checkpoint in progress has copied them.

        An asynchronous save returns before it has copied parameters, optimizer states and other weights. Whatever changes them waits here first: this
        library by the names below, callbacks and users by ``run.saver.hold()`` (:class:`callbacks.WeightAveraging` before it updates averages).
        Where they may change at any time, as in manual optimization, :attr:`engine.checkpoint.content.Content.changed_by_steps` is ``None``, and a
        save returns after it has copied everything.
        """
        if self._job is not None and self._job.staging is not None:
            self._job.staging.hold()

    before_step = hold
    """For the next optimizer step: each asynchronous save hands this to :meth:`engine.Engine.before_step`."""
    before_averages = hold
    """For averages that take over what ``on_checkpoint_loaded`` has changed."""
    before_closures = hold
    """For the module's ``optimizer_step``: an optimizer changes parameters between its evaluations of the loss, before the step itself."""
    before_hooks = hold
    """For hooks that may change weights: those of :data:`engine.loop.hooks.WEIGHT_CHANGING_EVENTS`."""
    before_roll_back = hold
    """For :meth:`engine.Run.roll_back`, which loads weights and optimizer states between two steps."""
    before_validation = hold
    """For validations, at whose start callbacks may swap the weights."""

    # -- on the writing thread ----------------------------------------------------------------------------------------------

    def _serve(self, group: Group) -> None:
        """Write the jobs of the queue. When no job has come for :data:`KEEP_S` seconds, free the buffers and end."""
        while True:
            try:
                job = self._queue.get(timeout=KEEP_S)
            except Empty:
                with self._lock:
                    if self._needs_buffers:
                        continue
                    self._thread = None
                    try:
                        if self._staging is not None:
                            self._staging.close()
                    except BaseException as error:
                        log_failure("checkpoint", "its buffers may still use memory; the next save has new ones", error)
                        self._staging = None
                    return
            if job is None:
                return
            try:
                self._run(job, group)
            except BaseException as error:  # the training waits for the outcome
                if job.future is not None and not job.future.done():
                    job.future.set_exception(error)
                else:
                    log_failure("checkpoint", "the next save goes on", error)
            del job

    def _run(self, job: _Job, group: Group) -> None:
        """Write one job, and put the outcome into its future."""
        assert job.future is not None
        with self._lock:
            self._needs_buffers = False
        future = job.future
        try:
            device_copies.call_on_device(group.device, partial(self._write, job, group))
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        job.parts, job.trees = {}, {}

    def _write(self, job: _Job, group: Group) -> None:
        """Write one checkpoint on all ranks; after an error on any rank, none of it is left."""
        try:
            all_or_none(group, partial(self._begin, job, group))
            files = all_or_none(group, partial(self._fill, job, group))
            all_or_none(group, lambda: self._seal(job, group, files) if group.is_main else None)
        except BaseException:
            if job.draft is not None:
                job.draft.abandon()
            raise
        job.folder.remove(job.remove)

    def _begin(self, job: _Job, group: Group) -> None:
        """Finish the copies, and begin the draft on the main process."""
        if job.staging is not None:  # before anything else: the training may be waiting in hold()
            copies = job.staging.complete()
            job.parts = {key: Part(copies[key], part.offsets) for key, part in job.parts.items()}
            job.trees = {s: (value, {n: copies[s, n] for n in tensors}) for s, (value, tensors) in job.trees.items()}
        if group.is_main:
            job.folder.sweep()
            job.draft = job.folder.storage.begin(job.name, folders=() if job.joined else FOLDERS)

    def _fill(self, job: _Job, group: Group) -> dict[str, Record]:
        """Write this rank's files into the draft, and return their records."""
        draft = job.draft
        if draft is None:
            draft = job.draft = job.folder.storage.begin(job.name, first=False)
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
            job.staging.verify(last=True)
        draft.send(files)
        return files

    def _fill_folders(self, job: _Job, group: Group, draft: Draft) -> dict[str, Record]:
        rank = group.rank
        works: list[Callable[[], dict[str, Record]]] = []
        for kind in ("optim", "model", WEIGHTS):
            parts = {key.partition("/")[2]: part for key, part in job.parts.items() if key.startswith(f"{kind}/")}
            if kind == WEIGHTS and (parts or OTHER_WEIGHTS in job.trees):
                (draft.folder / kind).mkdir(exist_ok=True)
            for index, file_parts in enumerate(into_files(parts)):
                name = f"{kind}/rank={rank:05d}{f'-{index}' if index else ''}.safetensors"
                works.append(partial(_write_parts, draft, name, file_parts))
        works += [partial(draft.write_tree, stem, tree) for stem, tree in job.trees.items()]
        write = partial(device_copies.call_on_device, group.device)  # a blocking save reads tensors on the device
        size = sum(part.tensor.nbytes for part in job.parts.values())
        return {name: record for records in in_parallel(write, works, size) for name, record in records.items()}

    def _seal(self, job: _Job, group: Group, files: list[dict[str, Record]]) -> None:
        assert job.draft is not None
        job.draft.seal(
            group.world_size,
            job.facts,
            {name: record for records in files for name, record in records.items()},
            {stem: value for stem, (value, _) in job.trees.items()} if job.joined else None,
        )
        job.folder.add_event("saved", job.name)


def _finish() -> None:
    """Complete the checkpoints in progress at the interpreter's exit."""
    for writer in list(_open):
        if writer._job is not None:
            writer.close(writer._job.folder, failed=writer.group.failed or getattr(sys, "last_value", None) is not None)


atexit.register(_finish)


def _is_small(parts: Mapping[str, Part], trees: Mapping[str, Packed]) -> bool:
    """Whether a checkpoint is small enough to be joined."""
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


def _write_parts(draft: Draft, name: str, parts: Mapping[str, Part]) -> dict[str, Record]:
    tensors = {key: part.tensor for key, part in parts.items()}
    return draft.write_tensors(name, tensors, {key: part.offsets for key, part in parts.items()})
