"""The exit statuses that ``fit --help`` lists, and what stands on stderr with each."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.ranks import PATIENCE_S, clean_environment, rank_variables, run_script

from engine.checkpoint.catalog import entries
from engine.distributed import failures

HALF = ("data.batch_size=2", "accelerator=cpu")
NAP = ("--set", "max_epochs=1000000", "num_sanity_val_steps=0", "model.nap=0.01", "accelerator=cpu")


def test_0_when_all_went_well(fit) -> None:
    assert fit("run", "net:Net", "--data", "net:numbers").status == 0
    assert fit("--version").status == 0


@pytest.mark.parametrize(
    ("fail", "last", "line"),
    [
        ("init", "ValueError: bad luck in __init__", 'raise ValueError("bad luck in __init__")'),
        ("step", "ValueError: bad luck in training_step", 'raise ValueError("bad luck in training_step")'),
        ("torch", "RuntimeError: mat1 and mat2", "torch.nn.functional.linear(batch, torch.ones(3, 3))"),
        ("log", "ValueError: log('loss') got a tensor", 'self.log("loss", torch.ones(3))'),
    ],
)
def test_1_with_the_users_traceback_for_an_error_in_the_users_code(
    fit, here: Path, fail: str, last: str, line: str
) -> None:
    ended = fit("run", "net:Net", "--data", "net:numbers", "--set", f"model.fail={fail}")
    assert ended.status == 1
    shown = ended.err.splitlines()
    assert shown[0] == "Traceback (most recent call last):"
    files = [each.split('"')[1] for each in shown if each.startswith('  File "')]
    assert files == [str(here / "net.py")]  # ours, and torch's on the way, are left out
    assert [each.strip() for each in shown if each.startswith("    ") and "^" not in each][-1] == line
    assert [each for each in shown if not each.startswith(" ")][-1].startswith(last)


def test_1_for_an_error_while_the_users_module_is_imported(fit, here: Path) -> None:
    (here / "broken.py").write_text("import net\nimport nowhere\n")
    ended = fit("run", "broken.py")
    assert ended.status == 1
    assert ended.err.splitlines()[-1] == "ModuleNotFoundError: No module named 'nowhere'"
    assert f'  File "{here / "broken.py"}", line 2, in <module>' in ended.err
    assert "engine/cli" not in ended.err


def test_2_for_a_module_that_ends_the_program(fit, here: Path) -> None:
    (here / "ends.py").write_text(
        "import sys\nfrom net import Net\nsys.exit()\n"
    )  # it would look as if the run had gone well
    ended = fit("run", "ends.py")
    assert ended.status == 2
    assert "the target 'ends.py': its module calls exit(None) when it is imported" in ended.err


def test_1_for_a_module_that_is_no_python(fit, here: Path) -> None:
    (here / "broken.py").write_text("def f(:\n")
    ended = fit("run", "broken.py")
    assert ended.status == 1
    assert ended.err.startswith(f'  File "{here / "broken.py"}", line 1\n    def f(:\n')


def test_tracebacks_of_causes_are_shown_and_are_the_users_too(fit, here: Path) -> None:
    lines = (
        "import net",
        "class Two(net.Net):",
        "    def training_step(self, batch, i):",
        "        try:",
        "            self.log('x', 'y')",
    )
    (here / "two.py").write_text(
        "\n".join((*lines, "        except Exception as error:", "            raise KeyError('z') from error"))
    )
    ended = fit("run", "two.py", "--data", "net:Numbers")
    assert ended.status == 1
    assert ended.err.count("Traceback (most recent call last):") == 2
    assert {each.split('"')[1] for each in ended.err.splitlines() if each.startswith('  File "')} == {
        str(here / "two.py")
    }


def test_1_for_what_goes_wrong_on_the_way(fit, here: Path) -> None:
    (here / "runs").write_text("in the way")
    ended = fit(
        "run",
        "net:Net",
        "--data",
        "net:numbers",
        "--callback",
        "ModelCheckpoint",
        "--set",
        "callbacks.0.max_failures=1",
    )
    assert ended.status == 1
    assert "runs" in ended.err


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ("evn",),
            ("--frobnicate",),
            ("run", "--frobnicate"),
            ("run", "net:Nett"),
            ("checkpoint", "lst"),
            ("env", "x"),
        ),
        ("run", "net:Net", "--set", "strategy.stage=3"),  # 'auto' has no stage
        ("run", "net:Net", "--set", "global_batch_size=8", "accumulate_grad_batches=2"),
    ],
)
def test_2_for_wrong_usage(fit, arguments: tuple[str, ...]) -> None:
    ended = fit(*arguments)
    assert ended.status == 2
    assert re.match(r"fit.*: error: ", ended.err.splitlines()[-1])
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("target", "fail", "message"),
    [("net:Net", "init", "ValueError: bad luck in __init__"), ("net:Nett", "", "UsageError: the target 'net:Nett'")],
)
def test_the_launcher_finds_the_error_where_it_looks_for_it(
    fit, here: Path, monkeypatch: pytest.MonkeyPatch, target: str, fail: str, message: str
) -> None:
    for name, value in {**rank_variables(0, 1, 29500), "TORCHELASTIC_ERROR_FILE": str(here / "error.json")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert fit("run", target, "--data", "net:numbers", "--set", f"model.fail={fail}").status == (1 if fail else 2)
    text, _, _ = failures.read(here / "error.json")
    assert text.splitlines()[-1].startswith(("engine.cli.terminal." if not fail else "") + message)
    assert ("engine/" in text) == (not fail)  # what the caller has raised is shown without our frames


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_130_and_143_leave_a_checkpoint(here: Path, sent: signal.Signals, status: int) -> None:
    _stopped(here, sent, status, "devices=1")


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_two_processes_end_with_the_same(here: Path, sent: signal.Signals, status: int) -> None:
    _stopped(here, sent, status, "devices=2")


def _stopped(here: Path, sent: signal.Signals, status: int, devices: str) -> None:
    """Send a signal to the whole process group, as a terminal does, when a step is done."""
    arguments = (
        "run",
        "net:Net",
        "--data",
        "net:Numbers",
        "--callback",
        "ModelCheckpoint",
        "--callback",
        "net:Tell",
        *NAP,
        devices,
    )
    command = [
        sys.executable,
        "-m",
        "engine.cli.main",
        *arguments,
        "callbacks.0.every=100000 steps",
        "callbacks.1.path=told",
    ]
    process = subprocess.Popen(
        command, env=clean_environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (here / "told").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.poll() is None, process.communicate()[1]
        os.killpg(process.pid, sent)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == status, err
    assert "Traceback" not in err
    assert [entry["complete"] for entry in entries("runs")] == [True]


def test_two_processes_run_the_same_command(here: Path) -> None:
    """Rank 0 starts the other by repeating ``fit run``; its data is shared out: the weight is that of one process.

    The script is an installed command's: it stands elsewhere, and the current directory is importable all the same.
    """
    (here / "bin").mkdir()
    (here / "bin" / "fit").write_text("import sys\nfrom engine.cli.main import main\nsys.exit(main())\n")
    arguments = (
        "run",
        "net:Net",
        "--data",
        "net:numbers",
        "--callback",
        "ModelCheckpoint",
        "--set",
        "devices=2",
        *HALF,
    )
    done = run_script(Path("bin/fit"), *arguments, forked=True)
    assert done.stdout.splitlines()[0] == "completed (max_epochs=1 reached): 1 epoch, 2 steps"
    sys.path.insert(0, str(here))
    from net import Net  # type: ignore[import-not-found]

    assert Net.load_from_checkpoint("runs").w.item() == -(1.5 + 5.5)
    assert entries("runs")[0]["world_size"] == 2


@pytest.mark.slow
def test_under_torchrun(here: Path) -> None:
    script = here / "fit"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m engine.cli.main "$@"\n')
    script.chmod(0o755)
    program = ["--no-python", str(script)]
    arguments = ("run", "net:Net", "--data", "net:numbers", "--callback", "ModelCheckpoint", "--set", *HALF)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *program, *arguments]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("completed") == 1
    assert entries("runs")[0]["world_size"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_traceback_of_the_rank_that_failed_is_shown(here: Path, rank: int) -> None:
    (here / "late.py").write_text(
        "import net\nclass Late(net.Net):\n    def training_step(self, batch, i):\n"
        f"        if self.global_rank == {rank}:\n            raise ValueError('bad luck')\n        return super().training_step(batch, i)\n"
    )
    command = [
        sys.executable,
        "-m",
        "engine.cli.main",
        "run",
        "late.py",
        "--data",
        "net:Numbers",
        "--set",
        "devices=2",
        "accelerator=cpu",
    ]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    told = done.stderr
    if rank == 1:
        told = told[told.index("fit: error: rank 1 failed with exit code 1. Its traceback:") :]
    assert "engine" not in told
    assert told.count("late.py") == told.count("Traceback") == told.count("ValueError: bad luck") == 1
    assert re.search(rf"^rank {1 - rank}: (was ended because of it|lost another rank)$", told, re.MULTILINE)


def test_a_reader_that_has_seen_enough_is_no_error_of_ours() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "engine.cli.main", "completion", "bash"]
    done = subprocess.run(
        command, env=clean_environment(), stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
