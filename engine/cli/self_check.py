"""``fit test`` without a target: checks that this installation trains correctly on this machine's devices, by small real runs in processes
of their own."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.cli.terminal import FAILED, OK
from engine.utils.device_names import BF16_REMEDY
from engine.utils.text import terminal_text

JOBS = "engine.cli.self_check_jobs"
"""The module that runs the checks, with ``python -m``."""
LIMIT_S = 120.0
"""The maximum time for the processes of one job (s)."""
LAUNCHERS = (
    *(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "GROUP_",
        "NODE_RANK",
        "MASTER_",
        "TORCHELASTIC_",
        "PET_",
        "SLURM_",
        "OMPI_",
        "PMI_",
        "MV2_",
        "MPI_",
    ),
    "FIT_",
)
"""Prefixes of the variables of launchers and of ``Fit``'s settings, which are removed because the checks are about this machine alone."""

_NETWORK = "let this machine reach itself: its name in /etc/hosts, no firewall on the loopback, GLOO_SOCKET_IFNAME=lo"
_TORCH = "reinstall torch for these devices, https://pytorch.org/get-started/locally"
CHECKS: dict[str, tuple[str, str]] = {
    "store": ("store on the loopback", _NETWORK),
    "single": ("training on one device", _TORCH),
    "bf16": ("bf16-mixed", "use precision=32-true, or a device that computes in bf16"),
    "resume": ("save and resume", "let the temporary directory ($TMPDIR) be writable and not full"),
    "one rank": ("one rank, every collective", f"{_NETWORK}; with a GPU, NCCL_DEBUG=INFO shows more"),
    "collectives": ("collectives", f"{_NETWORK}; with GPUs, NCCL_DEBUG=INFO shows more"),
    "ddp": ("DDP = one process", _TORCH),
    "fsdp": ("FSDP2 = one process", _TORCH),
    "deepspeed": (
        "DeepSpeed = one process",
        "pip install 'fit-trainer[deepspeed]'; a compiler if it builds operators; ds_report shows more",
    ),
}
"""Name of a check -> its title in the table, and what to do when the check fails."""
_ILLEGAL_INSTRUCTION = f"the process ended with signal {int(signal.SIGILL)}"
"""The end, in words, of a process that computed in bf16 on a CPU that does not support it."""
ON_ONE_DEVICE = ("store", "single", "bf16", "resume", "one rank")
ON_SEVERAL_DEVICES = ("collectives", "ddp", "fsdp")


@dataclass
class Outcome:
    """The outcome of one check."""

    check: str
    devices: str
    ok: bool | None
    """``None``: the check was not run, and ``detail`` says why."""
    detail: str
    seconds: float
    mend: str = ""
    """How to fix a check that failed."""


def run(options: argparse.Namespace) -> int:
    """Run all checks and print them.

    Returns:
        0, or 1 when one has failed.
    """
    outcomes = run_checks()
    if options.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    else:
        _table(outcomes)
    return FAILED if any(outcome.ok is False for outcome in outcomes) else OK


def run_checks() -> list[Outcome]:
    """Run all checks and return their outcomes."""
    with tempfile.TemporaryDirectory(prefix="fit-test-") as folder:
        work = Path(folder)
        outcomes = _job(ON_ONE_DEVICE, work)
        jobs = [ON_SEVERAL_DEVICES, *([("deepspeed",)] if importlib.util.find_spec("deepspeed") is not None else [])]
        with ThreadPoolExecutor() as pool:  # DeepSpeed's import is most of its time
            for job_outcomes in pool.map(lambda names: _job(names, work), jobs):
                outcomes += job_outcomes
    checked_names = {outcome.check for outcome in outcomes}
    return outcomes + [Outcome(name, "", None, "not installed", 0.0) for name in CHECKS if name not in checked_names]


def _job(names: Sequence[str], work: Path) -> list[Outcome]:
    """Run some checks in one process. If the process ends early, the check that was running has failed, and another process runs the rest."""
    outcomes: list[Outcome] = []
    pending = list(names)
    while pending:
        report = work / f"{pending[0]}.jsonl"
        began = time.perf_counter()
        how_it_ended = _run_in_process(pending, report, work)
        lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
        for line in lines:
            outcomes.append(Outcome(**line, mend="" if line["ok"] else CHECKS[line["check"]][1]))
        pending = pending[len(lines) :]
        if pending:
            name = pending.pop(0)
            seconds = time.perf_counter() - began - sum(line["seconds"] for line in lines)
            mend = BF16_REMEDY if how_it_ended.startswith(_ILLEGAL_INSTRUCTION) else CHECKS[name][1]
            outcomes.append(Outcome(name, "", False, how_it_ended, round(seconds, 2), mend))
    return outcomes


def _run_in_process(names: Sequence[str], report: Path, work: Path) -> str:
    """Run the checks in one process; return in words how the process ended."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    root = str(Path(__file__).resolve().parents[2])
    environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", JOBS, *names, "--report", str(report)]
    with report.with_suffix(".txt").open("w+") as output:
        process = subprocess.Popen(
            command, cwd=work, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"not finished after {LIMIT_S:g} s"
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        lines = [line.strip() for line in output.read().splitlines() if line.strip()]
    how_it_ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
    return f"the process ended with {how_it_ended}: {lines[-1] if lines else 'no output'}"


def _table(outcomes: Sequence[Outcome]) -> None:
    """Print the outcomes as a table."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(Column("check", no_wrap=True), Column("devices", no_wrap=True), "result", "seconds", "how to fix")
    words = {True: ("ok", "green"), False: ("failed", "red"), None: ("-", "")}
    for outcome in outcomes:
        result = Text.assemble(words[outcome.ok], terminal_text(f" {outcome.detail}" if outcome.detail else ""))
        table.add_row(
            CHECKS[outcome.check][0],
            outcome.devices,
            result,
            f"{outcome.seconds:.1f}",
            Text(terminal_text(outcome.mend)),
        )
    Console().print(table)
    Console().print(
        "These checks are of the installation on this machine, not of your project; 'fit test TARGET' runs the test loop of a module."
    )
