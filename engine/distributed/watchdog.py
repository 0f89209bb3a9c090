"""Ends a training that hangs, and reports which rank blocks it and where.

A thread of each rank polls a progress counter of the training, at no cost for the steps. When the counter has not changed for the
allowed time, each rank writes the stacks of its threads to a file and leaves a note for rank 0, whose report names the ranks that lag. Ranks that all
wait for each other are named after a minute, as a warning; after a SIGTERM they end then.

:func:`explain_mismatch`, for ``debug=True``, explains with a table of ranks that they have entered a collective with different operations, shapes
or dtypes.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from engine.distributed import failures, stacks
from engine.distributed.collectives import gather_json
from engine.distributed.early_signals import EarlySignals
from engine.distributed.failures import Interrupt
from engine.distributed.group import Group
from engine.distributed.stores import ANSWER_S, Notes
from engine.utils import torch_private
from engine.utils.errors import TERMINATED, HangError, MismatchError
from engine.utils.hard_links import separate
from engine.utils.log import logger
from engine.utils.text import terminal_text

WAIT_S = 60.0
"""The time (s) without progress after which ranks that all wait for each other are named."""
SETUP_IDLE_S = 30.0
"""The time (s) after which a thread that waits while a run is being set up is reported."""
GRACE_S = 20.0
"""The time (s) without progress, counted from a SIGTERM on, after which such ranks end. Schedulers kill after 30 s, ``fit launch`` after 120 s."""
NOTES_S = 3.0
"""The time (s) that rank 0 waits for the notes of all other ranks, which notice the stall within one poll of each other."""
REPORT_S = 6.0
"""The time (s) that other ranks wait for rank 0's report."""
LEAVE_S = 3.0
"""The time (s) that the training's thread has to react after the report. A thread that does not react is in native code, or sleeps."""
WORKER_S = 60.0
"""The time (s) after which a loader's worker that has not started is reported: if it hangs in its fork, it never will."""
IDLE = 0.05
"""A thread that uses a smaller fraction of a core than this is waiting or sleeping."""
MOST = 8
"""The maximum number of ranks that a report lists."""
ROWS_S = 3.0
"""The time (s) to wait for other ranks' notes about a mismatch, which all ranks find in the same collective."""
# The form of torch's message since 2.0.
_MISMATCH = "Detected mismatch between collectives on ranks"
_OWN_COLLECTIVE = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(?P<number>\d+), )?OpType=(?P<operation>\w+)"
    r"(?:, TensorShape=\[(?P<shapes>[^\]]*)\])?(?:, TensorDtypes=(?P<dtypes>[\w, ]*?))?(?:, TensorDeviceTypes=|\))"
)


@dataclass(frozen=True)
class HangNote:
    """The note that a rank leaves for rank 0 when its training hangs."""

    progress: float
    """The progress counter: batches finished, or whatever the training counts."""
    collectives: int
    """The number of collectives started on the process groups of all ranks."""
    at: str
    """The line of code at which the training stands."""
    waits: bool
    """Whether the training's thread waits for other ranks."""
    device: bool = False
    """Whether the training's thread waits for its device."""


class Watchdog:
    """Watches the calling thread until :meth:`stop`. All ranks create one together.

    Args:
        group: the ranks.
        progress: returns a number that changes whenever a batch is finished. Called from another thread.
        first_s: allowed seconds until the first change (start, compilation).
        limit_s: allowed seconds without a change afterwards.
        directory: the folder for the stacks, in ``rank=<r>.txt``.
        signals: says whether this rank has got SIGTERM; ``None``: it is not asked.
        model: the model, whose blocks reports name; ``None``: they name none.

    An idle thread of an earlier watchdog is reused, because starting a thread takes as long as a short evaluation.

    With several ranks a stall ends the process: :class:`HangError` is raised in the training's thread. If the thread does not react, the process
    writes the report to standard error and exits with status 1, or 143 after a SIGTERM. A single process only logs its position.

    Where all ranks wait, in collectives or for their devices, nothing will change by itself. After :data:`WAIT_S` without progress they are named,
    and the run goes on; with a SIGTERM on one of them, which they cannot honour, they end after :data:`GRACE_S`. Both times are twice the longest
    pause between two batches so far, if that is longer. A rank that works, as one that saves a checkpoint, postpones both.
    A thread that a debugger holds does not count as hanging.
    """

    def __init__(
        self,
        group: Group,
        progress: Callable[[], float],
        *,
        first_s: float,
        limit_s: float,
        directory: Path,
        signals: EarlySignals | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self._group, self._progress = group, progress
        self._model = model
        self._first_s, self._limit_s = first_s, limit_s
        self._directory = directory
        self._thread, self._native_id = threading.get_ident(), threading.get_native_id()
        # Processor time used up to the latest change of the progress.
        self._processor_s: float | None = time.thread_time()
        # The same up to the latest look without progress.
        self._processor_s_at_look: float | None = None
        # By process id, since when a worker is known not to have started (infinity: reported).
        self._late: dict[int, float] = {}
        self._is_idle = False
        """Whether the training's thread used no processor time between the latest two looks."""
        self._processes: list[tuple[str, int]] = [
            tuple(p) for p in gather_json(group, [socket.gethostname(), os.getpid()])
        ]
        self._rank_names: list[str] = [
            f"rank {rank} (host {host_name}, process {pid})" for rank, (host_name, pid) in enumerate(self._processes)
        ]
        self._signals = signals
        self._terminated_s: float | None = None
        """Seconds without progress since SIGTERM was seen; ``None``: it was not."""
        self._longest_s = 0.0
        """The longest pause between two changes of the progress, after the first change."""
        self._wait_note: dict[str, Any] | None = None
        """The note that this rank waits, as the others can read it now."""
        self._wait_is_told = False
        self._shared_notes = Notes(group, f"watchdog/{_next_number()}")
        self._first_progress = progress()
        self._report = self._cause = ""
        self._waiting = False
        self._interrupt = Interrupt(HangError)
        self._stopped, self._reported, self._fired = threading.Event(), threading.Event(), threading.Event()
        self._last_progress, self._still_s, self._last_look, self._stall_reported = (
            self._first_progress,
            0.0,
            time.monotonic(),
            False,
        )
        self._watcher = Watcher.watching(self, self._pause)

    def stop(self) -> None:
        """Stop watching, because the training has ended or has raised an error."""
        self._interrupt.forbid()
        self._stopped.set()
        self._watcher.leave(self)

    def explain(self, error: BaseException) -> HangError | None:
        """The :class:`HangError` to raise instead of ``error`` if that is a consequence of the hang; else ``None``."""
        self._interrupt.forbid()
        timed_out = failures.blames_peer(error) and (
            "timed out" in str(error).lower() or "monitoredbarrier" in str(error).lower()
        )
        if not isinstance(error, HangError) and not timed_out and not self._fired.is_set():
            return None
        if not self._fired.wait(3 * self._pause) or not self._reported.wait(REPORT_S + ANSWER_S):
            return None
        return self._error()

    @property
    def _pause(self) -> float:
        return min(1.0, self._limit_s / 10)

    def _error(self) -> HangError:
        error = HangError(self._report)
        error.waiting, error.terminated = self._waiting, bool(self._cause)
        return error

    def look(self) -> None:
        """Compare the progress with that at the last look. The watchdog's thread calls this after each pause."""
        if self._fired.is_set():
            return
        now, current = time.monotonic(), self._progress()
        # Limited, since the time of a suspended process (or a sleeping laptop) does not count.
        passed_s = min(now - self._last_look, 2 * self._pause)
        self._still_s += passed_s
        self._last_look = now
        if self._signals is not None and self._signals.terminated:
            self._terminated_s = 0.0 if self._terminated_s is None else self._terminated_s + passed_s
        if current != self._last_progress:
            if self._last_progress != self._first_progress:
                self._longest_s = max(self._longest_s, self._still_s)
            self._last_progress, self._still_s, self._stall_reported = current, 0.0, False
            self._processor_s = stacks.processor_s(self._native_id)
            self._terminated_s, self._wait_is_told = None, False
            self._withdraw_wait()
            return
        self._report_late_workers(now)
        if self._group.world_size > 1 and self._wait_for_each_other(current):
            return
        if self._stall_reported or self._still_s <= (
            self._first_s if current == self._first_progress else self._limit_s
        ):
            return
        position = self._position(self._still_s)
        if position.debugged:
            self._still_s = 0.0
            return
        self._stall_reported = True
        if self._group.world_size > 1:
            self._fire(current, position, self._still_s)
            return
        logger.warning(
            "no batch was finished for %.3g s; the training is at %s; all stacks: %s",
            self._still_s,
            position.line,
            self._write(),
        )

    def _wait_for_each_other(self, progress: float) -> bool:
        """Leave a note for the others while this rank waits for too long; return whether the training ends because all do and SIGTERM has come."""
        is_terminated = self._terminated_s is not None and self._terminated_s >= max(GRACE_S, 2 * self._longest_s)
        if not is_terminated and self._still_s < max(WAIT_S, 2 * self._longest_s):
            return False
        position = self._position(self._still_s)
        if position.debugged or not (position.waits or position.device):
            self._withdraw_wait()
            return False
        if self._wait_note is None or self._wait_note["terminated"] != is_terminated:
            self._wait_note = {"at": position.line, "terminated": is_terminated}
            self._shared_notes.write(f"wait/{self._group.rank}", self._wait_note)
        if not self._is_to_end():
            return False
        self._fire(progress, position, self._still_s, "SIGTERM has come, and ")
        return True

    def _is_to_end(self) -> bool:
        """Whether all ranks wait and one of them has got SIGTERM. Rank 0 finds that out, and names the ranks if they wait only."""
        if self._group.rank:
            return bool(self._shared_notes.read_all(["wait/end"]))
        notes = self._shared_notes.read_all([f"wait/{rank}" for rank in range(self._group.world_size)])
        if notes is None or None in notes:
            return False
        if any(note["terminated"] for note in notes):
            self._shared_notes.write("wait/end", True)
            return True
        if not self._wait_is_told:
            self._wait_is_told = True
            positions: dict[str, list[int]] = {}
            for rank, note in enumerate(notes):
                positions.setdefault(note["at"], []).append(rank)
            logger.warning(
                "no batch was finished for %.3g s, and all ranks wait, for each other or for their devices: a rank has perhaps made a call that all "
                "must make together (a collective, such as run.latest_metrics() or a save), or left one out, or runs other blocks of a model that "
                "FSDP or ZeRO 3 shards. The run ends after %.3g s of this\n%s",
                self._still_s,
                self._limit_s,
                "\n".join(_position_lines(positions)),
            )
        return False

    def _withdraw_wait(self) -> None:
        """Take back the note that this rank waits, because it works again."""
        if self._wait_note is not None:
            self._wait_note = None
            self._shared_notes.write(f"wait/{self._group.rank}", None)

    def _report_late_workers(self, now: float) -> None:
        """Warn, once for each, of workers that do not start, of the loader for which the training waits.

        A thread that waits for a worker uses no processor time. One that has used some since the last look runs, and its frames are not read.
        """
        used, used_before = stacks.processor_s(self._native_id), self._processor_s_at_look
        self._processor_s_at_look = used
        self._is_idle = used is not None and used == used_before
        if not self._is_idle:
            return
        late = {worker.pid: worker for worker in stacks.late_workers(self._thread)}
        self._late = {pid: self._late.get(pid, now) for pid in late}
        for pid, since in self._late.items():
            if now - since > WORKER_S:
                self._late[pid] = float("inf")
                logger.warning(
                    "%s has not started after %.3g s (process %d): it still imports, or it hangs in its fork and will never start",
                    late[pid].name,
                    now - since,
                    pid,
                )

    def _position(self, still_s: float) -> stacks.Position:
        """The training's position and, as far as it can be known, what its thread does there."""
        try:
            position = stacks.position(self._thread)
        except Exception as error:  # the report of a hang comes without it, too
            position = stacks.Position(f"(unknown, {type(error).__name__}: {error})", False)
        used = stacks.processor_s(self._native_id)
        if self._is_idle and (late := stacks.late_workers(self._thread)):
            names = ", ".join(worker.name for worker in late[:MOST])
            position = replace(
                position, line=f"{position.line} ({names} {'has' if len(late) == 1 else 'have'} not started)"
            )
        if self._is_idle and position.waits and (names := self._blocks()):
            position = replace(position, line=f"{position.line}; it gathers or reduces {names}")
        busy = None if used is None or self._processor_s is None else (used - self._processor_s) / still_s
        on_cpu = self._group.device.type == "cpu"
        # A thread may wait for its device in a busy loop; but a busy thread whose device is the CPU is computing.
        device = position.device and not (on_cpu and busy is not None and busy > IDLE)
        if device:
            activity = "waits for its device"
        elif position.waits or busy is None:
            return replace(position, device=False)
        else:
            activity = f"uses {min(busy, 1.0):.0%} of a core" if busy > IDLE else "uses no processor time"
        return replace(position, line=f"{position.line} ({activity})", device=device)

    def _blocks(self) -> str:
        """The names of the blocks, or parameters, of the model for which the training's thread waits; empty if there are none."""
        if self._model is None:
            return ""
        ids = [id(block) for block in stacks.blocks(self._thread)]
        named = [*self._model.named_modules(), *self._model.named_parameters()]
        names = [name or "the model" for name, block in named if id(block) in ids]
        return ", ".join(names[:MOST]) + (", ..." if len(names) > MOST else "")

    def _fire(self, progress: float, position: stacks.Position, still_s: float, cause: str = "") -> None:
        """Report the hang together with the other ranks, and interrupt the training's thread. ``cause``: the start of the report."""
        self._fired.set()
        self._cause = cause
        self._waiting = position.waits or position.device
        path = self._write()
        note = HangNote(progress, self._collectives(), position.line, position.waits, position.device)
        self._shared_notes.write(f"note/{self._group.rank}", asdict(note))
        self._report, lags = self._compose(note, still_s, path)
        self._waiting = self._group.rank not in lags
        if self._group.rank in (0, *lags):
            logger.error("%s", self._report)
        self._reported.set()
        if self._interrupt.interrupt() and not self._stopped.wait(LEAVE_S):
            self._end_process()

    def _write(self) -> Path:
        """Write the stacks of all threads to this rank's file, and return its path."""
        path = self._directory / f"rank={self._group.rank}.txt"
        try:
            text, record = stacks.all_threads(), stacks.flight_record()
        except Exception as error:  # the report of a hang comes without them, too
            text, record = f"the stacks cannot be read: {type(error).__name__}: {error}\n", None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            separate(path)
            path.write_text(text, encoding="utf-8")
            if record is not None:
                path.with_suffix(".nccl.json").write_text(record, encoding="utf-8")
        except OSError as error:
            sys.stderr.write(f"the stacks of rank {self._group.rank} cannot be written to {path} ({error}):\n{text}\n")
        return path

    def _collectives(self) -> int:
        """The number of collectives started on the process groups of all ranks; 0 if it is unknown."""
        total = 0
        groups = [group for group in (dist.group.WORLD, self._group.cpu) if group is not None]
        for group in groups:
            try:
                total += torch_private.collectives_started(group)
            except RuntimeError:  # a backend that does not count
                return 0
        return total

    def _compose(self, own_note: HangNote, still_s: float, path: Path) -> tuple[str, list[int]]:
        """The report and the ranks that lag: rank 0's report or, if rank 0 sends none, this rank's own."""
        rank, shared = self._group.rank, self._shared_notes
        if rank:
            sent = shared.read("report", REPORT_S)
            if sent:
                return str(sent["text"]), list(sent["lags"])
            if shared.answers:
                answer = self._unheard(0)
            else:
                answer = f"lost: {self._rank_names[0]}: the job's store there does not answer; its machine, its process or the network to it is gone"
            text = f"{self._head(still_s)}\n  {answer}"
            return f"{text}\n  {self._rank_names[rank]}: {own_note.at}\n{self._tail(path)}", [0]
        deadline = time.monotonic() + NOTES_S
        notes: dict[int, HangNote | None] = {0: own_note}
        for other_rank in range(1, self._group.world_size):
            answer = shared.read(f"note/{other_rank}", max(0.0, deadline - time.monotonic()))
            notes[other_rank] = HangNote(**answer) if answer else None
        lags = laggards(notes)
        text = "\n".join([self._head(still_s), *self._lines(notes, lags), self._tail(path)])
        shared.write("report", {"text": text, "lags": lags})
        return text, lags

    def _lines(self, notes: dict[int, HangNote | None], lags: list[int]) -> list[str]:
        """The lines of rank 0's report about the ranks: those that lag, then the positions of those that wait."""
        lines = []
        if len(lags) == len(notes) and all(note is not None and note.waits for note in notes.values()):
            lines.append("  all ranks wait for each other, in different collectives or in one that does not finish:")
        elif len(lags) == len(notes) > 1 and all(
            note is not None and (note.waits or note.device) for note in notes.values()
        ):
            lines.append(
                "  all ranks wait, for each other or for their devices, which may wait for a collective that another rank has not started:"
            )
        for rank in lags[:MOST]:
            note = notes[rank]
            if note is None:
                lines.append(f"  {self._unheard(rank)}")
            else:
                lines.append(f"  lags: {self._rank_names[rank]}: {note.at}")
        if len(lags) > MOST:
            lines.append(f"  and {len(lags) - MOST} more")
        positions: dict[str, list[int]] = {}
        for rank, note in notes.items():
            if note is not None and rank not in lags:
                positions.setdefault(note.at, []).append(rank)
        return lines + _position_lines(positions)

    def _unheard(self, rank: int) -> str:
        """The line about a rank that has left no note. On this machine it can be seen whether its process runs."""
        host, pid = self._processes[rank]
        if host == self._processes[self._group.rank][0] and stacks.runs(pid):
            return f"silent: {self._rank_names[rank]}: its process runs, but its watchdog gives no answer; see the log of that rank"
        return f"lost: {self._rank_names[rank]}: no answer; its machine, its process or the network to it is gone"

    def _head(self, still_s: float) -> str:
        return f"{self._cause}no batch was finished for {still_s:.3g} s"

    def _tail(self, path: Path) -> str:
        where = f"Stacks of every rank: {path.parent}{os.sep}rank=*.txt."
        if self._cause:
            return where
        return (
            f"{where} If this was not a hang, allow more time with Fit(timeout='1 h'), "
            "start_timeout= for the first batch, or timeout=None."
        )

    def _end_process(self) -> None:
        """End the process, whose training thread does not react."""
        error = self._error()
        if self._group.environment.error_file:
            failures.record(error, Path(self._group.environment.error_file))
        try:
            print(terminal_text(f"HangError: {self._report}"), file=sys.stderr, flush=True)
            sys.stdout.flush()
        finally:
            os._exit(TERMINATED if self._cause else 1)


class SetupWatch:
    """Watches the calling thread while a run is being set up, until :meth:`stop`: where hooks, loggers and loaders do as they like.

    A thread that waits for :data:`SETUP_IDLE_S`, and not for other ranks, is reported once with its position. After a SIGTERM the set-up has
    :data:`GRACE_S` left; then the process ends with status 143. There is nothing to save yet, and a call that does not return keeps handlers from
    running.

    Args:
        signals: says whether this process has got SIGTERM.
    """

    def __init__(self, signals: EarlySignals) -> None:
        self._signals = signals
        self._thread, self._native_id = threading.get_ident(), threading.get_native_id()
        self._last_look, self._processor_s = time.monotonic(), stacks.processor_s(self._native_id)
        self._idle_s = self._terminated_s = 0.0
        self._is_told = False
        self._watcher = Watcher.watching(self, 1.0)

    def stop(self) -> None:
        """Stop watching, because the set-up has ended."""
        self._watcher.leave(self)

    def look(self) -> None:
        """Look whether the thread has waited for too long. The watchdog's thread calls this after each pause."""
        now, used = time.monotonic(), stacks.processor_s(self._native_id)
        passed_s = min(now - self._last_look, 2.0)  # as in `Watchdog.look`
        is_idle = used is not None and self._processor_s is not None and used - self._processor_s < IDLE * passed_s
        self._idle_s = self._idle_s + passed_s if is_idle else 0.0
        self._last_look, self._processor_s = now, used
        if self._signals.terminated:
            self._terminated_s += passed_s
        is_over = self._terminated_s > GRACE_S
        if not is_over and (self._is_told or self._idle_s < SETUP_IDLE_S):
            return
        position = stacks.position(self._thread)
        if position.debugged:
            self._idle_s = self._terminated_s = 0.0
        elif is_over:
            try:
                text = (
                    f"SIGTERM: the run was still being set up after {GRACE_S:g} s, at {position.line}; the process ends"
                )
                print(terminal_text(text), file=sys.stderr, flush=True)
                sys.stdout.flush()
            finally:
                os._exit(TERMINATED)
        elif not position.waits:  # else another rank, which reports that, keeps this one waiting
            self._is_told = True
            logger.warning("the run is still being set up: for %.3g s it has waited at %s", self._idle_s, position.line)


class Watcher(threading.Thread):
    """A thread that serves one watchdog after another. It ends after the first pause in which it has none.

    Args:
        pause: seconds between two looks.
    """

    idle: ClassVar[list[Watcher]] = []
    """Threads without a watchdog. Whoever removes a thread from the list owns it: the next watchdog, or the thread itself, which then ends."""

    def __init__(self, pause: float) -> None:
        super().__init__(name="fit-watchdog", daemon=True)
        self.pause = pause
        self.dog: Watchdog | SetupWatch | None = None
        self._looking, self._ended = threading.Lock(), threading.Event()
        self._has_warned = False
        """Whether an error in a look for the current watchdog was logged."""

    @classmethod
    def watching(cls, dog: Watchdog | SetupWatch, pause: float) -> Watcher:
        """Return a thread that calls ``dog.look`` after each pause: an idle one, or a new one."""
        for watcher in [*cls.idle]:
            with suppress(ValueError):
                if watcher.pause == pause or not watcher.is_alive():
                    cls.idle.remove(watcher)
                    if watcher.is_alive():  # not alive in a forked process
                        watcher.dog, watcher._has_warned = dog, False
                        return watcher
        watcher = cls(pause)
        watcher.dog = dog
        watcher.start()
        return watcher

    def leave(self, dog: Watchdog | SetupWatch) -> None:
        """Stop looking for ``dog``; wait up to a second for a look in progress."""
        if self.dog is not dog:
            return
        under_way = not self._looking.acquire(timeout=1.0)
        self.dog = None
        if not under_way:
            self._looking.release()
        self.idle.append(self)

    def run(self) -> None:
        while not self._ended.wait(self.pause):
            if not self._look():
                with suppress(ValueError):
                    self.idle.remove(self)
                    return

    def _look(self) -> bool:
        """Check the progress once; return whether there still is a watchdog to check for. An error in a look, which is logged once, does not end
        the watch: a hang that follows must be found.

        This is a method of its own so that no local of :meth:`run` refers to the watchdog, and so to all objects of an ended run, during a pause.
        """
        with self._looking:
            if self.dog is None:
                return False
            try:
                self.dog.look()
            except BaseException:  # a SystemExit of the user's code ends no training from here
                if not self._has_warned:
                    self._has_warned = True
                    logger.exception(
                        "the watchdog could not look at the training; it goes on, and does not report this again"
                    )
            return True

    def end(self) -> None:
        """End this thread, which must have no watchdog."""
        if self.is_alive():
            self._ended.set()
            self.join(1.0)


@atexit.register
def _end_idle() -> None:
    """End idle threads at exit: one that wakes up while the interpreter shuts down would abort the process."""
    for watcher in [*Watcher.idle]:
        watcher.end()


def _position_lines(positions: dict[str, list[int]]) -> list[str]:
    """Lines about ranks that wait, by their position, the most frequent ones first."""
    lines = []
    for at, ranks in sorted(positions.items(), key=lambda item: -len(item[1]))[:MOST]:
        numbers = ", ".join(map(str, ranks[:MOST])) + (", ..." if len(ranks) > MOST else "")
        lines.append(f"  {'wait' if len(ranks) > 1 else 'waits'}: rank {numbers}: {at}")
    return lines


def collective_limit(limit_s: float, device: torch.device) -> timedelta:
    """The timeout of collectives when a batch may take ``limit_s``. It is longer, so that the stall is found while the ranks are still waiting.
    On the CPU a timeout is an error in the training's thread; NCCL's ends the process, so the report must be complete before."""
    return timedelta(seconds=limit_s + (3.0 if device.type == "cpu" else NOTES_S + REPORT_S + 2 * LEAVE_S))


def laggards(notes: dict[int, HangNote | None]) -> list[int]:
    """The ranks that block the others: those without a note; else those furthest behind in batches; else, of the ranks that wait neither for
    other ranks nor for their devices, those furthest behind in collectives; else all ranks."""
    if lost := [rank for rank, note in notes.items() if note is None]:
        return lost
    answered: dict[int, HangNote] = {rank: note for rank, note in notes.items() if note is not None}
    if len({note.progress for note in answered.values()}) > 1:
        lowest: float = min(note.progress for note in answered.values())
        return [rank for rank, note in answered.items() if note.progress == lowest]
    busy = {rank: note for rank, note in answered.items() if not note.waits and not note.device}
    if not busy:
        return list(answered)
    lowest = min(note.collectives for note in busy.values())
    return [rank for rank, note in busy.items() if note.collectives == lowest]


def explain_mismatch(error: BaseException, group: Group) -> MismatchError | None:
    """The error to raise instead of torch's ``error`` about a mismatch, with a line per rank; ``None`` for any other error. All ranks call this."""
    text = str(error)
    match = _OWN_COLLECTIVE.search(text) if _MISMATCH in text else None
    if match is None:
        return None
    number = match["number"] or "0"
    notes = Notes(group, f"mismatch/{number}")
    own_row = [
        match["operation"].lower(),
        f"[{match['shapes'] or ''}]",
        (match["dtypes"] or "").lower(),
        stacks.raised_at(error.__traceback__),
    ]
    notes.write(str(group.rank), own_row)
    rows = [["rank", "collective", "shape", "dtype", "called at"]]
    for rank in range(group.world_size):
        rows.append(
            [
                str(rank),
                *(own_row if rank == group.rank else notes.read(str(rank), ROWS_S) or ["(no answer)", "", "", ""]),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    return MismatchError(
        f"the ranks entered one collective with different arguments:\n{table}\nAll ranks must make the same calls, with equal shapes and dtypes."
    )


_number = 0


def _next_number() -> int:
    """The number of the next watchdog of this process, which is the same on all ranks."""
    global _number
    _number += 1
    return _number
