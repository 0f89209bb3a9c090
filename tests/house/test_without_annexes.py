"""The core works without what stands on it: in a copy without the annexes digits are trained, saved and resumed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ANNEXES = ("compat", "interop", "huggingface", "planning", "strategies/deepspeed")
"""Folders of ``engine`` that a copy does without."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages without the annexes, whose entry points are registered all the same, as in an installation that lacks them."""
    place = tmp_path_factory.mktemp("copy")
    left_out = {str(ROOT / "engine" / annex) for annex in ANNEXES}

    def ignore(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if str(Path(folder, name)) in left_out}

    for package in ("engine", "callbacks"):
        shutil.copytree(ROOT / package, place / package, ignore=ignore)
    shutil.copy(ROOT / "examples" / "digits.py", place)
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    groups = parser["options.entry_points"].items()
    installed = place / "fit_trainer.egg-info"
    installed.mkdir()
    (installed / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: fit-trainer\nVersion: 0.1.0\n")
    (installed / "entry_points.txt").write_text("\n".join(f"[{group}]{points}\n" for group, points in groups))
    return place


def ended(copy: Path, *arguments: str, status: int = 0) -> str:
    """What a Python process in the copy wrote, with this exit status."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == status, process.stdout + process.stderr
    return process.stdout + process.stderr


def test_digits_are_trained_and_saved_by_one_rank_and_resumed_by_two(copy: Path) -> None:
    asked = ("digits.py", "--batch-size", "256", "--root-dir", "runs")
    ended(copy, *asked, "--devices", "1", "--max-epochs", "1")
    assert "2 epochs" in ended(copy, *asked, "--devices", "2", "--max-epochs", "2", "--resume")


def test_the_command_line(copy: Path) -> None:
    command = ("-m", "engine.cli.main")
    assert "migrate" in ended(copy, *command, "--help")
    assert "--data" in ended(copy, *command, "run", "--help")
    data = ("--data", "digits.py:DigitsData")
    settings = (
        "data.batch_size=256",
        "model.lr=0.001",
        "model.max_epochs=1",
        "max_epochs=1",
        "limit_train_batches=1",
        "devices=1",
    )
    assert "completed" in ended(copy, *command, "run", "digits.py:Digits", *data, "--set", *settings)


def test_what_needs_an_annex_says_so(copy: Path) -> None:
    command = ("-m", "engine.cli.main")
    for asked in (("migrate", "digits.py"), ("config", "--from-lightning", "trainer.yaml")):
        assert "this installation has no engine.compat" in ended(copy, *command, *asked, status=2)
    code = "from engine import Fit\ntry:\n    Fit(gpus=2)\nexcept TypeError as error:\n    print(error)"
    assert "'gpus' is not an argument of Fit; possible: " in ended(copy, "-c", code)
    code = "from engine import Fit, strategies\ntry:\n    strategies.get('deepspeed_stage_2')\nexcept ValueError as error:\n    print(error)"
    assert (
        "strategy='deepspeed_stage_2' is not in this installation, which lacks engine.strategies.deepspeed: install the whole package again; "
        "possible: auto, single, ddp, fsdp, tp, pp, mesh, or a Strategy object"
    ) in ended(copy, "-c", code)
