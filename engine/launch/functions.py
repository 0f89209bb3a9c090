"""Functions run as the ranks of a job on this machine: from a notebook, and in tests."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.multiprocessing import SignalException

from engine.distributed import scratch
from engine.distributed.environment import detect
from engine.launch import agent, child, rendezvous
from engine.launch.job import Job, check_devices, cores
from engine.launch.output import Direct
from engine.launch.signals import signals
from engine.launch.torch_log import torch_log
from engine.utils import accelerator
from engine.utils.errors import RankError

T = TypeVar("T")


def notebook(fn: Callable[..., T], *args: Any, num_processes: int | None = None) -> list[T]:
    """Run ``fn(*args)`` in ``num_processes`` processes, from a notebook's cell, an interpreter or a script, and wait for them.

    The processes are forks of this one: ``fn`` may be defined in a cell and use objects of other cells. Inside, ``Fit`` and ``Engine`` find a
    job of that many ranks. Their output appears here. On the CPU they compute with one thread each, because the threads of this process do
    not exist in a fork.

    Args:
        num_processes: default: one for each device of the accelerator, or one.

    Returns:
        The ranks' return values in order; they must be picklable.

    Raises:
        RankError: a rank failed; the message has the first one's traceback. The others are terminated.
        RuntimeError: the GPU's driver was started in this process already, and forks cannot share it; or this process is a rank.
        ValueError: more processes than GPUs, or fewer than one.
    """
    wanted = os.environ.get("FIT_ACCELERATOR", "auto").lower()
    with warnings.catch_warnings():
        # Python 3.12 warns about every fork of a process with threads, which a notebook's kernel always has.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
        found = 0 if wanted == "cpu" else accelerator.devices_of_forks()
        if found is None:
            raise RuntimeError(
                "notebook() forks this process, and its GPU's driver has been started (a tensor or a model on the GPU, or "
                "torch.cuda.is_available() called), which forks cannot share. Restart the kernel, and use the GPU only inside the function; "
                "with the environment variable PYTORCH_NVML_BASED_CUDA_CHECK=1 torch.cuda.is_available() does not start the driver. To train "
                "on the CPU, set FIT_ACCELERATOR=cpu"
            )
        count = max(1, found) if num_processes is None else num_processes
        check_devices("num_processes =", count, found, wanted)
        return _run(fn, args, count, "fork", threads=1)


def debug(fn: Callable[..., T], *args: Any, num_processes: int = 2) -> list[T]:
    """Run ``fn(*args)`` in ``num_processes`` new processes on the CPU, over gloo: a job of several ranks for tests and debugging.

    The processes import ``fn`` by its name: it must be a function at the top level of a module, or of a script whose main code is under
    ``if __name__ == "__main__":``. They share the CPU's cores.

    Returns:
        The ranks' return values in order; they must be picklable.

    Raises:
        RankError: a rank failed; the message has the first one's traceback. The others are terminated.
        TypeError: ``fn`` or an argument cannot be pickled, or ``fn`` is defined in a notebook.
        RuntimeError: this process is a rank, or is just being started.
        ValueError: fewer than one process.
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
    return _run(fn, args, num_processes, "spawn", threads=max(1, cores() // max(1, num_processes)), cpu=True)


@dataclass(frozen=True)
class _Call:
    """The function of a rank. A single argument for torch's agent, which would expand macros in plain strings."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    parent: int
    threads: int
    cpu: bool

    def __call__(self) -> Any:
        os.setpgid(0, 0)  # the parent passes Ctrl-C on, once
        child.bind(self.parent)
        # A fork has the parent's handlers, and Fit replaces only Python's default ones.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(self.threads)
        if self.cpu:
            accelerator.hide()
        return self.fn(*self.args)


def _enter(call: _Call) -> Any:
    try:
        return call()
    except SystemExit as end:
        if end.code in (None, 0):  # torch's agent would wait for the value
            return None
        raise
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)  # torch would take it for success


def _run(
    fn: Callable[..., Any], args: tuple[Any, ...], count: int, start_method: str, *, threads: int, cpu: bool = False
) -> list[Any]:
    if count < 1:
        raise ValueError(f"num_processes={count}: it must be at least 1")
    here = detect(os.environ)
    if here.world_size > 1 or multiprocessing.current_process().name != "MainProcess":
        raise RuntimeError(
            f"{getattr(fn, '__qualname__', fn)} was to be started in {count} processes from a process that is itself one of several "
            f"({here.name}: rank {here.rank} of {here.world_size}). In a script, the start belongs under: if __name__ == '__main__':"
        )
    job = Job(command=(), nproc=count, grace_s=30.0, variables={"CUDA_VISIBLE_DEVICES": ""} if cpu else {})
    errors = scratch.make("fit-launch-")
    with signals(), torch_log(errors / "agent.log"):
        meeting = rendezvous.handler(job, Direct().say)
        started = agent.make_agent(
            job, meeting, Direct(), errors, _enter, (_Call(fn, args, os.getpid(), threads, cpu),), start_method
        )
        try:
            result = started.run()
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + int(error.sigval)) from None
        finally:
            meeting.shutdown()
            scratch.remove(errors)
    if result is None or result.is_failed():
        raise RankError(started.told)
    return [result.return_values[rank] for rank in range(count)]
