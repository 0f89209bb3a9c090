"""Ray Train in a local cluster of two cores: its workers are the ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from expected import DIGITS, TRAINED, accuracy, fit, reference
from support.ranks import PATIENCE_S, ROOT, clean_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason='Ray is not installed: pip install "fit-trainer[ray]"'
    ),
]
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0"}

FAILS = """
from engine import Engine


def main():
    engine = Engine(accelerator="cpu")
    with open(f"began{engine.process_index}", "a") as file:
        file.write("x")
    engine.wait_for_everyone()
    if engine.process_index == 1:
        raise KeyError("on purpose")
    engine.wait_for_everyone()


main()
"""


def test_digits_and_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    text = fit("launch", "--ray", "--nproc", 2, DIGITS, "--max-epochs", 4, cwd=tmp_path, environ=QUIET, timeout=240)
    assert accuracy(text) > 90
    fit(
        "launch",
        "--ray",
        "--nproc",
        2,
        "--max-restarts",
        1,
        TRAINED,
        "root",
        "result.json",
        cwd=tmp_path,
        environ=QUIET,
        timeout=240,
    )
    assert json.loads((tmp_path / "result.json").read_text()) == reference(tmp_path)


def test_a_rank_that_fails_is_started_again_and_then_told(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILS)
    command = [
        sys.executable,
        "-m",
        "engine.cli.main",
        "launch",
        "--ray",
        "--nproc",
        "2",
        "--max-restarts",
        "1",
        "script.py",
    ]
    done = subprocess.run(
        command, env=clean_environment(**QUIET), cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "in main" in done.stderr
    assert "KeyError: 'on purpose'" in done.stderr
    assert (tmp_path / "began1").read_text() == "xx"


def test_sigterm_ends_the_cluster_too(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "engine.cli.main",
        "launch",
        "--ray",
        "--nproc",
        "2",
        str(TRAINED),
        "root",
        "result.json",
        "--slow",
        "0.5",
    ]
    job = subprocess.Popen([*command, "--steps", "200"], env=clean_environment(**QUIET), cwd=tmp_path)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / "root").exists():
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.5)
        job.send_signal(signal.SIGTERM)
        assert job.wait(PATIENCE_S) == 143
    finally:
        job.kill()
    assert not [path for path in Path("/proc").glob("[0-9]*/cwd") if _within(path, tmp_path)]  # no rank outlives it


def _within(link: Path, folder: Path) -> bool:
    try:
        return link.readlink().is_relative_to(folder)
    except OSError:
        return False


def test_more_ranks_than_the_cluster_has_cores(tmp_path: Path) -> None:
    code = (
        "import ray, subprocess, sys\nray.init(num_cpus=1, include_dashboard=False, logging_level='ERROR')\n"
        "address = ray.get_runtime_context().gcs_address\n"
        "command = [sys.executable, '-m', 'engine.cli.main', 'launch', '--ray', '--ray-address', address, '--nproc', '2', sys.argv[1]]\n"
        "done = subprocess.run(command, capture_output=True, text=True)\n"
        "print(done.returncode, done.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(DIGITS)],
        env=clean_environment(**QUIET),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.startswith("1 ")
    assert "--nproc 2: Ray's cluster has 1 core(s) for the ranks, and each needs one" in done.stdout
    assert os.environ.get("RAY_ADDRESS") is None
