"""Run scripts and functions as the ranks of one job, real processes over gloo, and collect what each of them reports.

A process group costs seconds, a function on it milliseconds: a test file runs all its functions of ranks in one job (:func:`ranks_of_file`).
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from support.forkserver import Forked, ForkServer

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"

PATIENCE_S = 300.0
"""How long ranks may take when nothing is wrong (s): importing torch alone takes a minute on a machine with a load of 20."""

# Variables of a launcher around the tests must not reach the ranks, nor pytest's own (a script that starts ranks refuses pytest), nor the debugger
# that Ray names when a test imports it.
_FOREIGN = (
    *(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_",
        "MASTER_",
        "TORCHELASTIC_",
        "SLURM_",
        "FIT_",
        "PYTEST_",
    ),
    *(
        "OMPI_",
        "PMI_",
        "PMIX_",
        "MPI_LOCAL",
        "MV2_",
        "PET_",
        "KUBERNETES_",
        "RAY_ADDRESS",
        "NODE_RANK",
        "PYTHONBREAKPOINT",
    ),
)

_TRITON = re.compile(r"nanobind: leaked .*?refleaks\.html\n?", re.DOTALL)
"""What the triton of torch 2.15 writes when any process that has imported it ends."""

Process = subprocess.Popen[bytes] | Forked

_REPORT = """
def report(value):
    import json, os
    with open(os.environ["TEST_REPORT"], "w") as file:
        json.dump(value, file)
"""


@dataclass
class Ran:
    """How one rank ended. ``value`` is what it gave to ``report`` (JSON), ``None`` without; ``seconds`` its life."""

    rank: int
    returncode: int
    stdout: str
    stderr: str
    value: Any
    seconds: float


def run_ranks(
    script: str | Path,
    world_size: int,
    *args: object,
    timeout: float = PATIENCE_S,
    check: bool = True,
    env: Mapping[str, str] | None = None,
) -> list[Ran]:
    """Run ``script`` (a path, or source text, which may call ``report(value)``) as ``world_size`` ranks under torchrun's variables.

    Args:
        args: the script's arguments, as text.
        timeout: for all together (s); then they are killed and an ``AssertionError`` shows what they wrote.
        check: a rank that fails ends the others and is an ``AssertionError`` with its output.
        env: further variables.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    with tempfile.TemporaryDirectory() as directory:
        variables = [
            rank_variables(rank, world_size, store.port) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            for rank in range(world_size)
        ]
        return _run(script, args, variables, Path(directory), timeout, check, env or {}, _fork)


def run_script(
    script: str | Path,
    *args: object,
    timeout: float = PATIENCE_S,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    forked: bool = False,
) -> Ran:
    """Run ``script`` as a plain ``python script.py``, without a launcher's variables.

    With ``forked`` torch and the library are there already, which saves seconds: for scripts that do not ask what is imported.
    """
    with tempfile.TemporaryDirectory() as directory:
        return _run(script, args, [{}], Path(directory), timeout, check, env or {}, _fork if forked else _start)[0]


def ranks_of_file(
    file: str, world_size: int, prefix: str = "rank_", timeout: float = PATIENCE_S, **env: str
) -> dict[str, list[Any]]:
    """Run every function of a test file whose name starts with ``prefix`` on every rank of one job.

    Returns:
        What each function returned (JSON): ``{name without prefix: [value by rank]}``.
    """
    lines = (
        f"import sys; sys.path[0] = {str(TESTS)!r}",
        "from support import ranks",
        "if __name__ == '__main__':  # a spawned worker of the rank imports this, too",
        "    ranks.run_functions(*sys.argv[1:])",
    )
    ran = run_ranks("\n".join(lines), world_size, file, prefix, timeout=timeout, env=env)
    return {name: [rank.value[name] for rank in ran] for name in ran[0].value}


def ranks_of(function: Callable[..., Any], world_size: int, *args: object, timeout: float = PATIENCE_S) -> list[Any]:
    """Run one function of a test file on every rank of one job and return its values (JSON) by rank. ``args`` arrive as text."""
    folders = [str(TESTS), str(Path(function.__code__.co_filename).parent)]
    lines = (
        f"import sys; sys.path[:0] = {folders!r}",
        f"import {function.__module__} as tests",
        "from support import ranks",
        f"report(tests.{function.__name__}(*sys.argv[1:]))",
        "ranks.leave()",
    )
    return [ran.value for ran in run_ranks("\n".join(lines), world_size, *args, timeout=timeout)]


def run_functions(file: str, prefix: str) -> None:
    """Be one rank of :func:`ranks_of_file`: call every function of the file whose name starts with ``prefix``, and report."""
    spec = importlib.util.spec_from_file_location("ranked_functions", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    warnings.simplefilter("error")
    functions = {name: function for name, function in vars(module).items() if name.startswith(prefix)}
    values = {}
    for name, function in functions.items():
        gc.freeze()  # DeepSpeed collects garbage with each model that it shards, and would walk its own import each time
        values[name.removeprefix(prefix)] = function()
    Path(os.environ["TEST_REPORT"]).write_text(json.dumps(values))
    leave()


def leave() -> NoReturn:
    """End this rank after its exit handlers, without Python's own shutdown: that walks all that was imported, 0.3 s of processor time.

    A test of how a process ends uses :func:`run_ranks`.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set on a single machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without any launcher's variables, with the package importable and one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}


@contextmanager
def _script_file(script: str | Path, directory: Path) -> Iterator[Path]:
    if isinstance(script, Path):
        yield script
        return
    path = directory / "script.py"
    path.write_text(script + "\n" if "from __future__" in script else _REPORT + script)
    yield path


def _run(
    script: str | Path,
    args: Sequence[object],
    variables: list[dict[str, str]],
    directory: Path,
    timeout: float,
    check: bool,
    env: Mapping[str, str],
    start: Callable[[Sequence[str], Mapping[str, str], Path, Path], Process],
) -> list[Ran]:
    with _script_file(script, directory) as path:
        begun = time.monotonic()
        processes: list[Process] = []
        seconds = [0.0] * len(variables)
        for rank, own in enumerate(variables):
            own = clean_environment(**own, TEST_REPORT=str(directory / f"{rank}.json")) | dict(env)
            processes.append(
                start([str(path), *map(str, args)], own, directory / f"{rank}.out", directory / f"{rank}.err")
            )
        try:
            problem = _await_all(processes, seconds, begun, timeout, check)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    ran = [_collect(rank, process.returncode, directory, seconds[rank]) for rank, process in enumerate(processes)]
    if problem:
        outputs = "\n".join(
            f"--- rank {r.rank}: exit code {r.returncode}\n{r.stdout[-2000:]}{r.stderr[-6000:]}" for r in ran
        )
        raise AssertionError(f"{problem}\n{outputs}")
    return ran


def _start(command: Sequence[str], environment: Mapping[str, str], out: Path, err: Path) -> Process:
    """A new interpreter."""
    with out.open("w") as first, err.open("w") as second:
        return subprocess.Popen(
            [sys.executable, *command], env=environment, stdin=subprocess.DEVNULL, stdout=first, stderr=second
        )


def _fork(command: Sequence[str], environment: Mapping[str, str], out: Path, err: Path) -> Process:
    """A process that has torch imported."""
    return forkserver().fork(command, environment, out, err)


@cache
def forkserver() -> ForkServer:
    """The fork server of this test process."""
    return ForkServer(clean_environment())


def _await_all(processes: Sequence[Process], seconds: list[float], begun: float, timeout: float, check: bool) -> str:
    """Wait for all; what went wrong, if anything."""
    grace = begun + timeout
    problem = ""
    while True:
        now = time.monotonic()
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            seconds[rank] = seconds[rank] or (now - begun if code is not None else 0.0)
            if check and code and not problem:
                problem = f"rank {rank} failed with exit code {code}"
                grace = min(grace, now + 30.0)  # for the others to end by themselves, with their view of it
        if None not in codes:
            return problem
        if now > grace:
            return (
                problem
                or f"still running after {timeout:g} s: ranks {[rank for rank, code in enumerate(codes) if code is None]}"
            )
        time.sleep(0.02)


def _collect(rank: int, returncode: int, directory: Path, seconds: float) -> Ran:
    value = directory / f"{rank}.json"
    return Ran(
        rank,
        returncode,
        (directory / f"{rank}.out").read_text(errors="replace"),
        _TRITON.sub("", (directory / f"{rank}.err").read_text(errors="replace")),
        json.loads(value.read_text()) if value.exists() else None,
        seconds,
    )
