"""Running a function as the ranks of a job on this machine, from a notebook or in tests."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.distributed import failures
from engine.distributed.environments import detect
from engine.launch import child, rendezvous
from engine.launch.agent import Agent, Program, SignalReceived, signals_raised
from engine.launch.job import Job, check_devices, cores
from engine.launch.output import Streams, Terminal
from engine.launch.supervisor import Rank
from engine.utils import accelerator, scratch
from engine.utils.errors import INTERRUPTED, RankError

T = TypeVar("T")


def notebook(fn: Callable[..., T], *args: Any, num_processes: int | None = None) -> list[T]:
    """Run ``fn(*args)`` in ``num_processes`` processes, from a notebook's cell, an interpreter or a script, and wait for them.

    The processes are forks of this one: ``fn`` may be defined in a cell and use objects of other cells. Inside ``fn``, ``Fit`` and ``Engine``
    find a job of that many ranks. The ranks' output appears here. On the CPU each computes with one thread, because the threads of this
    process do not exist in a fork.

    Args:
        num_processes: number of ranks; by default one for each device of the accelerator, or one on the CPU.

    Returns:
        The ranks' return values in order; they must be picklable.

    Raises:
        RankError: a rank failed; the message has the traceback of the first to fail. The other ranks are terminated.
        RuntimeError: the GPU's driver was started in this process already, and forks cannot share it; or this process is a rank.
        ValueError: ``num_processes`` is less than 1, or more than there are GPUs.
    """
    kind = os.environ.get("FIT_ACCELERATOR", "auto").lower()
    with warnings.catch_warnings():
        # Python 3.12 warns about every fork of a process with threads, which a notebook's kernel always has.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
        devices = 0 if kind == "cpu" else accelerator.devices_of_forks()
        if devices is None:
            raise RuntimeError(
                "notebook() forks this process, and its GPU's driver has been started (a tensor or a model on the GPU, or "
                "torch.cuda.is_available() called), which forks cannot share. Restart the kernel, and use the GPU only inside the function; "
                "with the environment variable PYTORCH_NVML_BASED_CUDA_CHECK=1 torch.cuda.is_available() does not start the driver. To train "
                "on the CPU, set FIT_ACCELERATOR=cpu"
            )
        count = max(1, devices) if num_processes is None else num_processes
        check_devices("num_processes =", count, devices, kind)
        return _run(fn, args, count, multiprocessing.get_context("fork"), threads=1)


def debug(fn: Callable[..., T], *args: Any, num_processes: int = 2) -> list[T]:
    """Run ``fn(*args)`` in ``num_processes`` new processes on the CPU, as ranks that communicate over gloo, for tests and debugging.

    The processes import ``fn`` by name: it must be a function at the top level of a module, or of a script whose main code is under
    ``if __name__ == "__main__":``. They share the CPU's cores.

    Returns:
        The ranks' return values in order; they must be picklable.

    Raises:
        RankError: a rank failed; the message has the traceback of the first to fail. The other ranks are terminated.
        TypeError: ``fn`` or an argument cannot be pickled, or ``fn`` is defined in a notebook.
        RuntimeError: this process is a rank, or a process spawned by multiprocessing that is re-importing the main script.
        ValueError: ``num_processes`` is less than 1.
    """
    try:
        pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"debug({getattr(fn, '__qualname__', fn)}): it cannot be sent to new processes ({error}). Define the function at "
            "the top level of a module, or use engine.launch.notebook, whose processes are forks"
        ) from error
    main = sys.modules["__main__"]
    if (
        getattr(fn, "__module__", None) == "__main__"
        and getattr(main, "__file__", None) is None
        and main.__spec__ is None
    ):
        raise TypeError(
            f"debug({getattr(fn, '__qualname__', fn)}): it is defined in a notebook or at a prompt, where new processes cannot find "
            "it. Define it in a module, or use engine.launch.notebook, whose processes are forks"
        )
    threads = max(1, cores() // max(1, num_processes))
    return _run(fn, args, num_processes, multiprocessing.get_context("spawn"), threads=threads, cpu=True)


@dataclass(frozen=True)
class _Call:
    """The call that each rank makes; it is sent to the ranks' processes."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    parent: int
    """Process id of the process that starts the ranks."""
    threads: int
    """Threads of each rank on the CPU."""
    cpu: bool
    """Whether the accelerator is hidden from the ranks."""

    def run(self, variables: Mapping[str, str], error_file: Path, result_file: Path) -> None:
        """Call the function in this process, which is a rank. Write a failure to ``error_file``, the return value to ``result_file``."""
        os.setpgid(0, 0)  # out of the terminal's reach: the parent passes Ctrl-C on, once
        child.die_with_parent(self.parent)
        # A fork has the parent's signal handlers, and Fit replaces only Python's default ones.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(variables)
        torch.set_num_threads(self.threads)
        if self.cpu:
            accelerator.show_only_cpu()
        try:
            # In a file, because torch's queues share tensors' memory, and this process would have to wait for their reader.
            result_file.write_bytes(pickle.dumps(self.fn(*self.args)))
        except KeyboardInterrupt:
            os._exit(INTERRUPTED)
        except Exception as error:
            failures.record(error, error_file)
            sys.exit(1)


class FunctionRank(Rank):
    """A rank that calls a function, in a process of the multiprocessing module."""

    def __init__(
        self, local_rank: int, rank: int, process: BaseProcess, pid: int, error_file: Path, result_file: Path
    ) -> None:
        super().__init__(local_rank, rank, pid, error_file)
        self._process, self._result_file = process, result_file

    def wait(self) -> int:
        while (code := self._process.exitcode) is None:
            self._process.join()
        return code

    def result(self) -> Any:
        """The function's return value; ``None`` if the function has ended the process (``sys.exit()``)."""
        return pickle.loads(self._result_file.read_bytes()) if self._result_file.exists() else None


class _Function(Program):
    """A function that each rank calls, in a fork of this process or in a new one."""

    def __init__(self, call: _Call, context: ForkContext | SpawnContext) -> None:
        self._call, self._context = call, context
        self.ranks: list[FunctionRank] = []

    def start(
        self, local_rank: int, rank: int, variables: Mapping[str, str], error_file: Path, streams: Streams
    ) -> FunctionRank:
        result_file = error_file.with_suffix(".result")
        process = self._context.Process(target=self._call.run, args=(variables, error_file, result_file))
        process.start()
        assert process.pid is not None
        self.ranks.append(FunctionRank(local_rank, rank, process, process.pid, error_file, result_file))
        return self.ranks[-1]


def _run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    count: int,
    context: ForkContext | SpawnContext,
    *,
    threads: int,
    cpu: bool = False,
) -> list[Any]:
    if count < 1:
        raise ValueError(f"num_processes={count}: it must be at least 1")
    environment = detect(os.environ)
    if environment.world_size > 1 or multiprocessing.current_process().name != "MainProcess":
        raise RuntimeError(
            f"{getattr(fn, '__qualname__', fn)} was to be started in {count} processes from a process that is itself one of several "
            f"({environment.name}: rank {environment.rank} of {environment.world_size}). In a script, the start belongs under: "
            "if __name__ == '__main__':"
        )
    job = Job(command=(), nproc=count, grace_s=30.0, variables={"CUDA_VISIBLE_DEVICES": ""} if cpu else {})
    errors = scratch.make_directory("fit-launch-")
    program = _Function(_Call(fn, args, os.getpid(), threads, cpu), context)
    with signals_raised() as signals:
        try:
            agent = Agent(job, rendezvous.meeting_of(job, Terminal()), Terminal(), errors, program, signals)
            if not agent.run():
                raise RankError(agent.report)
            return [rank.result() for rank in program.ranks]
        except SignalReceived as error:
            if error.number == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.number) from None
        finally:
            scratch.remove(errors)
