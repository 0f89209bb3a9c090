"""Shared by all tests; its place makes the helpers beside it (``support``) importable."""

import contextlib
import gc
import glob
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from engine.utils.device_names import bf16_ends_the_process

# A shell lets what it starts in the background ignore Ctrl-C, and with it every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Until all test files are imported: what they import stays, and collections that walk it are half of a worker's start (8 of 15 s).
gc.disable()

# Before torch is loaded, here and in the processes that tests start. Threads of several workers would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if bf16_ends_the_process():
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"


def pytest_sessionstart() -> None:
    """Fail where a program of ``REQUIRED_PROGRAMS`` is missing: tests that need it would be skipped, and the job would be green."""
    missing = [name for name in os.environ.get("REQUIRED_PROGRAMS", "").split() if shutil.which(name) is None]
    if missing:
        pytest.exit(f"REQUIRED_PROGRAMS: not installed: {', '.join(missing)}", 1)


def pytest_configure() -> None:
    """Remove locks of torch's extension builds (DeepSpeed's optimizers) that no process holds: whoever was killed in a build left one, and every
    later build would wait for it."""
    cache = os.environ.get("TORCH_EXTENSIONS_DIR", os.path.expanduser("~/.cache/torch_extensions"))
    locks = glob.glob(f"{cache}/**/lock", recursive=True)
    held = set()
    for file in glob.glob("/proc/[0-9]*/fd/*") if locks else ():
        with contextlib.suppress(OSError):
            held.add(os.readlink(file))
    for lock in set(locks) - held:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(lock)


def pytest_collection_finish() -> None:
    """What a worker has imported is left out of every later collection of garbage: with all test files' libraries one takes half a second."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _other_files_objects_are_not_walked() -> None:
    """Collections of garbage walk what this test file makes and imports, not what the files before it did."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _errors_are_shown_as_before() -> Iterator[None]:
    """No test file leaves another hook for uncaught exceptions behind: torch's begins each line with a rank, in all later files too."""
    before = sys.excepthook
    yield
    left, sys.excepthook = sys.excepthook, before
    assert left is before, f"this file left {left} as sys.excepthook"


@pytest.fixture
def checkpoints_in_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small checkpoints have the files of large ones: for tests that change one of them."""
    monkeypatch.setattr("engine.checkpoint.manifest.JOINED_BYTES", -1)


@pytest.fixture(scope="module")
def no_pickle_is_read() -> Iterator[None]:
    """Reading a pickle fails in this process: for the test files of what writes and reads checkpoints."""
    import torch

    def refused(*arguments: Any, **options: Any) -> NoReturn:
        raise AssertionError("a pickle was read")

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
            patch.setattr(owner, name, refused)
        yield
