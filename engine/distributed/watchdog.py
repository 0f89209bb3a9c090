"""Ends a training that hangs, and reports which rank blocks it and where.

A thread of each rank polls a progress counter of the training; the steps themselves do nothing. When the counter has not changed for the
allowed time, each rank writes the stacks of its threads to a file and leaves a note for rank 0, which names the ranks that lag.

:func:`explain_mismatch` is for ``debug=True``: ranks that enter one collective with different operations, shapes or dtypes, as a table of ranks.
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
from typing import ClassVar

import torch
import torch.distributed as dist

from engine.distributed import failures, stacks
from engine.distributed.collectives import gather_json
from engine.distributed.failures import Interrupt
from engine.distributed.group import Group
from engine.distributed.stores import ANSWER_S, Notes
from engine.utils import torch_private
from engine.utils.errors import HangError, MismatchError
from engine.utils.log import logger
from engine.utils.text import terminal_text

NOTES_S = 3.0
"""How long rank 0 waits for the notes of all others (s); their stalls are noticed within a poll of each other."""
REPORT_S = 6.0
"""How long the others wait for rank 0's report (s)."""
LEAVE_S = 3.0
"""After the report: how long the training's thread may take to react (s). A thread that does not is in native code, or sleeps."""
WORKER_S = 60.0
"""A loader's worker that has not started for so long is reported (s): it may hang in its fork, and then never starts."""
IDLE = 0.05
"""A thread that uses less of a core than this waits or sleeps."""
MOST = 8
"""The maximum number of ranks that a report lists."""
ROWS_S = 3.0
"""How long the other ranks' notes about a mismatch may take (s): all ranks find it in the same collective."""
# The form of torch's message since 2.0.
_MISMATCH = "Detected mismatch between collectives on ranks"
_OWN_COLLECTIVE = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(?P<number>\d+), )?OpType=(?P<operation>\w+)"
    r"(?:, TensorShape=\[(?P<shapes>[^\]]*)\])?(?:, TensorDtypes=(?P<dtypes>[\w, ]*?))?(?:, TensorDeviceTypes=|\))"
)


@dataclass(frozen=True)
class Note:
    """A rank's note when it hangs."""

    progress: float
    """Batches finished, or whatever the training counts."""
    collectives: int
    """Collectives started on the groups of all ranks."""
    at: str
    waits: bool
    """For other ranks."""
    device: bool = False
    """It waits for its device."""


class Watchdog:
    """Watches the calling thread from now until :meth:`stop`; a collective (all ranks create one).

    Args:
        group: the ranks.
        progress: a number that changes whenever a batch is finished. Called from another thread.
        first_s: allowed seconds until the first change (start, compilation).
        limit_s: allowed seconds without a change afterwards.
        directory: where stacks are written: ``rank=<r>.txt``.

    Its thread is one that an earlier watchdog has left, if there is one; otherwise it starts one, which takes as long as a short evaluation.

    With several ranks a stall ends the process: :class:`HangError` is raised in the training's thread, and if that does not react the process
    exits with status 1 and the report on its standard error. A single process only logs its position.
    A thread that a debugger holds does not count as hanging.
    """

    def __init__(
        self, group: Group, progress: Callable[[], float], *, first_s: float, limit_s: float, directory: Path
    ) -> None:
        self._group, self._progress = group, progress
        self._first_s, self._limit_s = first_s, limit_s
        self._directory = directory
        self._thread, self._native = threading.get_ident(), threading.get_native_id()
        self._processor_s: float | None = time.thread_time()  # used until the progress changed last
        self._late: dict[int, float] = {}  # workers that have not started, by process: since when (infinity: reported)
        host = socket.gethostname()
        self._who: list[str] = [
            f"rank {rank} (host {where}, process {pid})"
            for rank, (where, pid) in enumerate(gather_json(group, [host, os.getpid()]))
        ]
        self._shared_notes = Notes(group, f"watchdog/{_next()}")
        self._begun = progress()
        self._report = ""
        self._waiting = False
        self._interrupt = Interrupt(HangError)
        self._stopped, self._reported, self._fired = threading.Event(), threading.Event(), threading.Event()
        self._before, self._still_s, self._looked, self._told = self._begun, 0.0, time.monotonic(), False
        self._watcher = Watcher.of(self, self._pause)

    def stop(self) -> None:
        """The training is over, or its error is known."""
        self._interrupt.withdraw()
        self._stopped.set()
        self._watcher.leave(self)

    def explain(self, error: BaseException) -> HangError | None:
        """The error to raise instead of ``error``, if that is only how this rank noticed the hang."""
        self._interrupt.withdraw()
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
        found = HangError(self._report)
        found.waiting = self._waiting
        return found

    def look(self) -> None:
        """Compare the progress with that of the last look. The thread of the watchdog calls this after each pause."""
        if self._fired.is_set():
            return
        now, current = time.monotonic(), self._progress()
        # A suspended process (or a sleeping laptop) has not hung meanwhile.
        self._still_s += min(now - self._looked, 2 * self._pause)
        self._looked = now
        if current != self._before:
            self._before, self._still_s, self._told = current, 0.0, False
            self._processor_s = stacks.processor_s(self._native)
            return
        self._report_late_workers(now)
        if self._told or self._still_s <= (self._first_s if current == self._begun else self._limit_s):
            return
        here = self._position(self._still_s)
        if here.debugged:
            self._still_s = 0.0
            return
        self._told = True
        if self._group.world_size > 1:
            self._fire(current, here, self._still_s)
            return
        logger.warning(
            "no batch was finished for %.3g s; the training is at %s; all stacks: %s",
            self._still_s,
            here.line,
            self._write(),
        )

    def _report_late_workers(self, now: float) -> None:
        """Name, once, the workers of a loader that the training waits for, if they do not start."""
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
        """Where the training stands, and what its thread does there, as far as that can be known."""
        here, used = stacks.position(self._thread), stacks.processor_s(self._native)
        if late := stacks.late_workers(self._thread):
            names = ", ".join(worker.name for worker in late[:MOST])
            here = replace(here, line=f"{here.line} ({names} {'has' if len(late) == 1 else 'have'} not started)")
        busy = None if used is None or self._processor_s is None else (used - self._processor_s) / still_s
        on_cpu = self._group.device.type == "cpu"
        # A device may be waited for by looking at it all the time; but there is nothing to wait for where the CPU itself computes.
        device = here.device and not (on_cpu and busy is not None and busy > IDLE)
        if device:
            told = "waits for its device"
        elif here.waits or busy is None:
            return replace(here, device=False)
        else:
            told = f"uses {min(busy, 1.0):.0%} of a core" if busy > IDLE else "uses no processor time"
        return replace(here, line=f"{here.line} ({told})", device=device)

    def _fire(self, progress: float, here: stacks.Position, still_s: float) -> None:
        self._fired.set()
        self._waiting = here.waits or here.device
        path = self._write()
        note = Note(progress, self._collectives(), here.line, here.waits, here.device)
        self._shared_notes.write(f"note/{self._group.rank}", asdict(note))
        self._report, lags = self._compose(note, still_s, path)
        self._waiting = self._group.rank not in lags
        if self._group.rank in (0, *lags):
            logger.error("%s", self._report)
        self._reported.set()
        if self._interrupt.strike() and not self._stopped.wait(LEAVE_S):
            self._die()

    def _write(self) -> Path:
        path = self._directory / f"rank={self._group.rank}.txt"
        text = stacks.all_threads()
        record = stacks.flight_record()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            if record is not None:
                path.with_suffix(".nccl.json").write_text(record, encoding="utf-8")
        except OSError as error:
            sys.stderr.write(f"the stacks of rank {self._group.rank} cannot be written to {path} ({error}):\n{text}\n")
        return path

    def _collectives(self) -> int:
        total = 0
        groups = [group for group in (dist.group.WORLD, self._group.cpu) if group is not None]
        for group in groups:
            try:
                total += torch_private.collectives_started(group)
            except RuntimeError:  # a backend that does not count
                return 0
        return total

    def _compose(self, own: Note, still_s: float, path: Path) -> tuple[str, list[int]]:
        """The report, and which ranks lag: rank 0's, or this rank's own if rank 0 writes none."""
        rank, shared = self._group.rank, self._shared_notes
        if rank:
            sent = shared.read("report", REPORT_S)
            if sent:
                return str(sent["text"]), list(sent["lags"])
            reached = (
                "it has not noticed that this rank hangs" if shared.answers else "the job's store there does not answer"
            )
            text = f"{self._head(still_s)}\n  lost: {self._who[0]}: {reached}; its machine, its process or the network to it is gone"
            return f"{text}\n  {self._who[rank]}: {own.at}\n{self._tail(path)}", [0]
        deadline = time.monotonic() + NOTES_S
        notes: dict[int, Note | None] = {0: own}
        for other in range(1, self._group.world_size):
            found = shared.read(f"note/{other}", max(0.0, deadline - time.monotonic()))
            notes[other] = Note(**found) if found else None
        lags = laggards(notes)
        text = "\n".join([self._head(still_s), *self._lines(notes, lags), self._tail(path)])
        shared.write("report", {"text": text, "lags": lags})
        return text, lags

    def _lines(self, notes: dict[int, Note | None], lags: list[int]) -> list[str]:
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
                lines.append(
                    f"  lost: {self._who[rank]}: no answer; its machine, its process or the network to it is gone"
                )
            else:
                lines.append(f"  lags: {self._who[rank]}: {note.at}")
        if len(lags) > MOST:
            lines.append(f"  and {len(lags) - MOST} more")
        positions: dict[str, list[int]] = {}
        for rank, note in notes.items():
            if note is not None and rank not in lags:
                positions.setdefault(note.at, []).append(rank)
        for at, ranks in sorted(positions.items(), key=lambda item: -len(item[1]))[:MOST]:
            shown = ", ".join(map(str, ranks[:MOST])) + (", ..." if len(ranks) > MOST else "")
            lines.append(f"  {'wait' if len(ranks) > 1 else 'waits'}: rank {shown}: {at}")
        return lines

    def _head(self, still_s: float) -> str:
        return f"no batch was finished for {still_s:.3g} s"

    def _tail(self, path: Path) -> str:
        return (
            f"Stacks of every rank: {path.parent}{os.sep}rank=*.txt. If this was not a hang, allow more time with Fit(timeout='1 h'), "
            "start_timeout= for the first batch, or timeout=None."
        )

    def _die(self) -> None:
        """End the process: its main thread sleeps, or is in native code."""
        error = self._error()
        if self._group.environment.error_file:
            failures.record(error, Path(self._group.environment.error_file))
        try:
            print(terminal_text(f"HangError: {self._report}"), file=sys.stderr, flush=True)
            sys.stdout.flush()
        finally:
            os._exit(1)


class Watcher(threading.Thread):
    """The thread of a watchdog, or of one watchdog after the other: it ends at the first pause after which it has none.

    Args:
        pause: seconds between two looks.
    """

    idle: ClassVar[list[Watcher]] = []
    """Those without a watchdog. Whoever removes one has it: the next watchdog, or the thread itself, which then ends."""

    def __init__(self, pause: float) -> None:
        super().__init__(name="fit-watchdog", daemon=True)
        self.pause = pause
        self.dog: Watchdog | None = None
        self._looking, self._ended = threading.Lock(), threading.Event()

    @classmethod
    def of(cls, dog: Watchdog, pause: float) -> Watcher:
        """A thread that looks after this watchdog."""
        for watcher in [*cls.idle]:
            with suppress(ValueError):
                if watcher.pause == pause or not watcher.is_alive():
                    cls.idle.remove(watcher)
                    if watcher.is_alive():  # not so in a forked process
                        watcher.dog = dog
                        return watcher
        watcher = cls(pause)
        watcher.dog = dog
        watcher.start()
        return watcher

    def leave(self, dog: Watchdog) -> None:
        """This watchdog needs no more looks; one that is under way has a second."""
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
        """Whether there is a watchdog. No name in :meth:`run` refers to it, or a pause would keep all objects of a run that has ended."""
        with self._looking:
            if self.dog is None:
                return False
            self.dog.look()
            return True

    def end(self) -> None:
        """End the thread, which has no watchdog."""
        if self.is_alive():
            self._ended.set()
            self.join(1.0)


@atexit.register
def _end_idle() -> None:
    """A thread that wakes up while the interpreter is taken down would abort the process."""
    for watcher in [*Watcher.idle]:
        watcher.end()


def collective_limit(limit_s: float, device: torch.device) -> timedelta:
    """How long a collective may wait, when a batch may take ``limit_s``: longer, so that the stall is found while the ranks are still
    waiting. On the CPU the collective's error then reaches the training's thread; NCCL's ends the process, so the report must come first."""
    return timedelta(seconds=limit_s + (3.0 if device.type == "cpu" else NOTES_S + REPORT_S + 2 * LEAVE_S))


def laggards(notes: dict[int, Note | None]) -> list[int]:
    """The ranks that block the others: those without an answer; else those furthest behind in batches; else those that wait neither for
    others nor for their devices; among several, those furthest behind in collectives; else all."""
    if lost := [rank for rank, note in notes.items() if note is None]:
        return lost
    known: dict[int, Note] = {rank: note for rank, note in notes.items() if note is not None}
    if len({note.progress for note in known.values()}) > 1:
        least: float = min(note.progress for note in known.values())
        return [rank for rank, note in known.items() if note.progress == least]
    busy = {rank: note for rank, note in known.items() if not note.waits and not note.device}
    if not busy:
        return list(known)
    least = min(note.collectives for note in busy.values())
    return [rank for rank, note in busy.items() if note.collectives == least]


def explain_mismatch(error: BaseException, group: Group) -> MismatchError | None:
    """The error to raise instead of torch's, with a line per rank; ``None`` when ``error`` is another one. All ranks call it together."""
    text = str(error)
    found = _OWN_COLLECTIVE.search(text) if _MISMATCH in text else None
    if found is None:
        return None
    number = found["number"] or "0"
    notes = Notes(group, f"mismatch/{number}")
    mine = [
        found["operation"].lower(),
        f"[{found['shapes'] or ''}]",
        (found["dtypes"] or "").lower(),
        stacks.raised_at(error.__traceback__),
    ]
    notes.write(str(group.rank), mine)
    rows = [["rank", "collective", "shape", "dtype", "called at"]]
    for rank in range(group.world_size):
        rows.append(
            [str(rank), *(mine if rank == group.rank else notes.read(str(rank), ROWS_S) or ["(no answer)", "", "", ""])]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    return MismatchError(
        f"the ranks entered one collective with different arguments:\n{table}\nAll ranks must make the same calls, with equal shapes and dtypes."
    )


_number = 0


def _next() -> int:
    """Counts the watchdogs of this process; all ranks create the same ones."""
    global _number
    _number += 1
    return _number
