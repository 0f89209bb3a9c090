"""The positions of this process's threads: full stacks, and the one line that says most about the training.

The threads run on while their frames are read. On CPython 3.11 reading ``f_back`` makes a frame object, which may start a garbage collection; a
finalizer in it may let the other thread run, whose frame is then gone: ``f_back`` returns an arbitrary object, or the interpreter crashes. So
stacks are read by ``faulthandler`` (:func:`_lines_of_threads`), which makes no objects and lets no other thread run. What it does not show, locals
and the call within a line, is read from frames while no collection starts (:func:`_frames`); once a frame object exists it stays valid.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import linecache
import os
import re
import sys
import sysconfig
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

import torch
from torch import Tensor, nn

from engine.utils import accelerator, garbage, torch_private

_LIBRARIES = tuple(
    {
        str(Path(__file__).resolve().parents[1]),
        str(Path(torch.__file__).resolve().parent),
        *(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")),
    }
)
# Code in which a thread waits for other ranks: collectives, and the backward pass, which reduces gradients.
_WAITING_CODE = (
    str(Path(torch.__file__).resolve().parent / "distributed"),
    str(Path(torch.__file__).resolve().parent / "nn" / "parallel"),
    str(Path(torch.__file__).resolve().parent / "autograd" / "graph.py"),
    str(Path(__file__).resolve().parent),
)
# Modules of code that gathers and reduces a model in blocks.
_sharding: tuple[str, ...] = ("torch.distributed.fsdp.", "torch.distributed._composable.", "engine.utils.torch_private")
_waiting_wrappers: tuple[str, ...] = ()
"""Ends of the paths of files whose frame is the innermost one of a thread that waits for a collective in native code."""
_BLOCKS = ("module", "current_submodule", "sub_module", "params_to_reduce", "self")
"""The locals of such code that are a block, its parameters, or the object that has it."""
_LOADERS = {
    "engine.loop.timing": "training",
    "engine.loop.train": "training",
    "engine.loop.evaluate": "evaluation",
}
"""The kind of loader that each module reads, for messages."""
_DEBUGGERS = re.compile(
    rf"^{re.escape(sysconfig.get_path('stdlib'))}[/\\\\][pb]db\.py$|[/\\\\](pydevd\.py|_pydevd_bundle[/\\\\].*|debugpy[/\\\\].*|IPython[/\\\\]core[/\\\\]debugger\.py)$"
)
"""The files of debuggers."""
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
"""Lines that ``faulthandler`` writes."""
Line = tuple[str, int, str]
"""A frame's file, line and function."""


MOST = 80
"""The maximum number of characters that are shown of a source line."""
_doing: dict[int, str] = {}
"""The activities of threads in words, by ``threading.get_ident()``; :func:`doing` sets them."""


# The source of calls that return only when the device has finished the work queued before.
_DEVICE_WAITS = re.compile(
    r"\.(item|tolist|numpy|cpu|is_nonzero|nonzero)\([^()]*\)$|\.to\(.*\bcpu\b.*\)$|synchroni[sz]e\w*\(.*\)$|^(float|int|bool)\(",
    re.DOTALL,
)


@dataclass(frozen=True)
class Position:
    """The position of a thread in the code."""

    line: str
    """The innermost line of the user's own code: ``train.py:34 in training_step: time.sleep(60)``."""
    waits: bool
    """Whether the thread waits for other ranks, in a collective or a backward pass."""
    debugged: bool = False
    """Whether a debugger holds the thread."""
    device: bool = False
    """Whether the thread waits for a device, in a call such as ``loss.item()`` or ``torch.cuda.synchronize()``. The host cannot see what the device
    waits for, perhaps a collective that another rank has not started."""


def position(thread: int) -> Position:
    """The position of the thread with this ``threading.get_ident()``."""
    lines = _lines_of_threads().get(thread)
    if not lines:
        return Position("(the thread has ended)", False)
    debugged = any(_DEBUGGERS.search(file) for file, _, _ in lines)
    file, number, function = lines[0]
    line = _user_line(lines)
    innermost = "" if line.startswith(f"{file}:{number} ") else f" (now in {Path(file).name}:{number} {function})"
    activity = f"; it is {_doing[thread]}" if thread in _doing else ""
    waits = file.startswith(_WAITING_CODE) or file.endswith(_waiting_wrappers)
    return Position(
        line + innermost + activity,
        waits,
        debugged,
        not waits and _DEVICE_WAITS.search(_call_source(thread, lines[0])) is not None,
    )


def know_sharding(modules: str, waiting_wrapper: Path) -> None:
    """Let reports know another library that shards models.

    Args:
        modules: the start of the names of its modules that gather and reduce a model in blocks.
        waiting_wrapper: the end of the path of its file through which it calls native code that waits for other ranks.
    """
    global _sharding, _waiting_wrappers
    if modules not in _sharding:
        _sharding, _waiting_wrappers = (*_sharding, modules), (*_waiting_wrappers, str(waiting_wrapper))


@dataclass(frozen=True)
class LateWorker:
    """A worker process of a ``DataLoader`` that has not reached torch's worker loop."""

    pid: int
    name: str
    """The worker's name for messages, such as ``worker 0 of the training loader``."""


def late_workers(thread: int) -> list[LateWorker]:
    """Workers that have not started, of the loader for which the thread with this ``threading.get_ident()`` waits. Always empty outside of Linux."""
    workers: Sequence[Any] = ()
    module = ""
    for frame in _frames().get(thread, ()):
        module = str(frame.f_globals.get("__name__"))
        if module == "torch.utils.data.dataloader":
            with garbage.postponed():  # reading the locals of a running frame has the same danger
                workers = workers or getattr(frame.f_locals.get("self"), "_workers", ())
        elif workers and not module.startswith("engine.data."):
            break  # this module reads the loader
    if not workers:
        return []
    kind, unchanged = _LOADERS.get(module, "data"), _command("self")
    return [
        LateWorker(worker.pid, f"worker {number} of the {kind} loader")
        for number, worker in enumerate(workers)
        if unchanged and _command(worker.pid) == unchanged  # torch renames the process when a worker has started
    ]


def blocks(thread: int) -> list[nn.Module | Tensor]:
    """The modules or parameters that the thread with this ``threading.get_ident()`` gathers, or whose gradients it reduces, under FSDP or ZeRO; empty
    if it does neither, or its position says what it does (:func:`doing`). Call this only while the thread waits.

    A backward pass may run its hooks in a thread of its own, which is looked at, too.
    """
    if thread in _doing:
        return []
    frames_of_threads = _frames()
    frames = frames_of_threads.pop(thread, [])
    for frame in itertools.chain(frames, *frames_of_threads.values()):
        if str(frame.f_globals.get("__name__")).startswith(_sharding):
            with garbage.postponed():  # as in late_workers
                values = [frame.f_locals.get(name) for name in _BLOCKS]
            for value in values:
                if parts := _blocks_in(value):
                    return parts
    return []


def _blocks_in(value: object) -> list[nn.Module | Tensor]:
    """The modules or parameters that a local is or has. Only FSDP's own objects are looked into: others have the whole model, too."""
    if type(value).__name__ == "FSDPBlock":
        value = vars(value)["module"]
    elif type(value).__name__ == "FSDPParamGroup":
        value = vars(value)["modules"]
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [part for part in parts if isinstance(part, (nn.Module, nn.Parameter))]


def _frames() -> dict[int, list[FrameType]]:
    """The frames of each thread by its ``threading.get_ident()``, innermost first."""
    with garbage.postponed():
        return {
            thread: [frame for frame, _ in traceback.walk_stack(innermost)]
            for thread, innermost in sys._current_frames().items()
        }


def _lines_of_threads() -> dict[int, list[Line]]:
    """The lines at which each thread's frames stand, by its ``threading.get_ident()``, innermost first; the first 100 of each."""
    with _scratch_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    threads: dict[int, list[Line]] = {}
    lines: list[Line] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            lines = threads.setdefault(int(match[1], 16), [])
        elif match := _FRAME.match(line):
            path, number, function = match.groups()
            lines.append((_unescaped(path), int(number) if number.isdigit() else 0, _unescaped(function)))
    return threads


def _scratch_file() -> IO[bytes]:
    """A file in memory where there are such, since disks may be full or hang; else a temporary one."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stacks"), "w+b")
    return tempfile.TemporaryFile()


def _unescaped(text: str) -> str:
    """A name as it is: ``faulthandler`` writes other characters than ASCII as ``\\xe9`` or ``\\u4e00``."""
    return re.sub(
        r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))", lambda m: chr(int(m[1] or m[2] or m[3], 16)), text
    )


def _command(pid: int | str) -> str:
    """The name of a process's main thread; empty if the process has ended, or the name is unknown."""
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def _call_source(thread: int, line: Line) -> str:
    """The source of the expression that a thread's innermost frame, at this line, is evaluating, on one line; empty if it is unknown."""
    with garbage.postponed():
        frame = sys._current_frames().get(thread)
    if frame is None or (frame.f_code.co_filename, frame.f_lineno) != line[:2]:
        return ""
    positions = list(frame.f_code.co_positions())
    first, last, start, end = positions[frame.f_lasti // 2] if 0 <= frame.f_lasti // 2 < len(positions) else [None] * 4
    if first is None or last is None or start is None or end is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, number).encode() for number in range(first, last + 1)]
    lines[-1] = lines[-1][:end]  # columns count bytes
    lines[0] = lines[0][start:]
    return b" ".join(line.strip() for line in lines).decode(errors="replace")


def processor_s(native_thread: int) -> float | None:
    """The processor time (s) that the thread with this ``threading.get_native_id()`` has used; ``None`` outside of Linux."""
    try:
        return int(Path(f"/proc/self/task/{native_thread}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def runs(pid: int) -> bool:
    """Whether a process of this machine runs. One that has ended and whose parent has not asked for its status does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    except OSError:  # no /proc here
        return True


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Set what this thread is doing inside the block, in words, for reports of hangs."""
    thread = threading.get_ident()
    _doing[thread] = what
    try:
        yield
    finally:
        del _doing[thread]


def raised_at(trace: TracebackType | None) -> str:
    """The innermost line of the user's own code that raised an error, in the form of :attr:`Position.line`."""
    return _user_line(
        [(entry.filename, entry.lineno or 0, entry.name) for entry in reversed(traceback.extract_tb(trace))]
    )


def _user_line(frames: list[Line]) -> str:
    """Describe the innermost frame of the user's own code. ``frames``: (file, line, function) of each frame, innermost first."""
    user_frames = [entry for entry in frames if not entry[0].startswith((*_LIBRARIES, "<"))]
    file, number, function = (user_frames or frames or [("?", 0, "?")])[0]
    text = linecache.getline(file, number).strip()
    text = text if len(text) <= MOST else f"{text[:MOST]}..."
    return f"{file}:{number} in {function}" + (f": {text}" if text else "")


def all_threads() -> str:
    """The stacks of all Python threads, the innermost line last, in the form of tracebacks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, lines in _lines_of_threads().items():
        if ident != threading.get_ident():
            stack = "".join(traceback.StackSummary.from_list([(*line, None) for line in reversed(lines)]).format())
            parts.append(f"thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)


def flight_record() -> str | None:
    """NCCL's last collectives from torch's flight recorder (JSON); ``None`` if nothing was recorded."""
    with contextlib.suppress(RuntimeError):
        record = torch_private.nccl_record() if accelerator.in_use() else None
        return record.decode() if isinstance(record, bytes) else record
    return None
