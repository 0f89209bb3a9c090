"""``fit test`` alone: its checks find what they look for, and its table says what to do."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import engine_snapshot
from engine.cli import self_check, self_check_jobs
from engine.cli.self_check import CHECKS, Outcome
from engine.utils import accelerator
from engine.utils.device_names import BF16_REMEDY

RANKS = self_check_jobs.Ranks()

# A job whose first check succeeds, whose second one ends the process, and whose third one never ends.
JOB = """
import argparse, json, os, signal, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("checks", nargs="+")
parser.add_argument("--report")
arguments = parser.parse_args()
assert "FIT_PRECISION" not in os.environ
for name in arguments.checks:
    if name == "bf16":
        print("no bf16 here", file=sys.stderr)
        os._exit(3)
    if name == "resume":
        time.sleep(600)
    if name == "fsdp":
        os.kill(os.getpid(), signal.SIGILL)
    with open(arguments.report, "a") as file:
        print(json.dumps({"check": name, "devices": "1 x cpu", "ok": name != "ddp", "detail": "", "seconds": 0.0}), file=file)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_check_that_ends_its_process_has_failed_and_the_others_are_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "broken_job.py").write_text(JOB)
    monkeypatch.setattr(self_check, "JOBS", "broken_job")
    monkeypatch.setattr(self_check, "LIMIT_S", 10.0)
    monkeypatch.setenv("FIT_PRECISION", "nonsense")  # settings around the checks are none of theirs
    began = time.monotonic()
    found = self_check._job(["store", "bf16", "single", "resume", "fsdp", "ddp"], folder)
    assert time.monotonic() - began < 300
    assert [(each.check, each.ok, each.detail) for each in found] == [
        ("store", True, ""),
        ("bf16", False, "the process ended with exit code 3: no bf16 here"),
        ("single", True, ""),
        ("resume", False, "not finished after 10 s"),
        ("fsdp", False, "the process ended with signal 4: no output"),
        ("ddp", False, ""),
    ]
    mends = ["", CHECKS["bf16"][1], "", CHECKS["resume"][1], BF16_REMEDY, CHECKS["ddp"][1]]
    assert [each.mend for each in found] == mends
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in BF16_REMEDY


def test_the_table_and_the_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good = [Outcome("store", "1 x cpu", True, "", 0.25), Outcome("deepspeed", "", None, "not installed", 0.0)]
    monkeypatch.setattr(self_check, "run_checks", lambda: good)
    assert self_check.run(Namespace(json=False)) == 0
    shown = capsys.readouterr().out
    assert "not of your project" in " ".join(shown.split())
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if line.startswith("│")
    ]
    assert rows == [
        ["store on the loopback", "1 x cpu", "ok", "0.2", ""],
        ["DeepSpeed = one process", "", "- not installed", "0.0", ""],
    ]
    monkeypatch.setattr(
        self_check, "run_checks", lambda: [*good, Outcome("ddp", "2 x cpu", False, "weights differ", 1.0, "do this")]
    )
    assert self_check.run(Namespace(json=True)) == 1
    last = json.loads(capsys.readouterr().out)[2]
    assert last == {
        "check": "ddp",
        "devices": "2 x cpu",
        "ok": False,
        "detail": "weights differ",
        "seconds": 1.0,
        "mend": "do this",
    }


def test_checks_of_one_device_pass(folder: Path) -> None:
    for name in ("store", "single", "bf16", "resume"):
        assert self_check_jobs.CHECKS[name][0]("cpu", RANKS) in (None, "")


def test_one_rank_reaches_every_collective(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP reduces, FSDP shards, saves happen beside the training: with one rank none of it would be reached."""
    self_check_jobs.single("cpu", RANKS)
    for name in (
        "last_value",
        "last_exc",
    ):  # pytest sets them when a test before this one failed; a job that fails leaves its group alone
        monkeypatch.delattr(sys, name, raising=False)
    seen: list[str] = []
    real = self_check_jobs.trained

    def trained(module: Any, kind: str, ranks: Any, **settings: Any) -> Any:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            real(module, kind, ranks, **settings)
        names = {event.name for event in profile.events()}
        parameters = {type(p).__name__ for p in module.parameters()}
        seen.append(f"{settings['strategy']}: {'gloo:all_reduce' in names} {parameters}")
        return module

    monkeypatch.setattr(self_check_jobs, "trained", trained)
    told = self_check_jobs.one_rank("cpu", RANKS)
    assert seen == ["ddp: True {'Parameter'}"] * 2 + ["fsdp: True {'DTensor'}"] * 2
    assert told.startswith("weights differ by ")
    assert not torch.distributed.is_initialized()


def test_a_device_without_collectives_of_its_own_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "device", lambda kind, index: torch.device(kind, index))
    assert self_check_jobs._with_collectives("cpu") == ("cpu", "")
    assert self_check_jobs._with_collectives("cuda") == ("cuda", "")
    for kind in ("mps", "mtia"):  # gloo's name, and none
        found, told = self_check_jobs._with_collectives(kind)
        assert found == "cpu"
        assert f"{kind} has no collectives of its own" in told


def test_the_tolerance_is_a_multiple_of_the_products_rounding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**-26 < self_check_jobs.rounding("cpu") < 2**-19  # float32 has 24 bits
    self_check_jobs.single("cpu", RANKS)
    module = self_check_jobs.Net.load_from_checkpoint(self_check_jobs.REFERENCE)
    with torch.no_grad():
        module.net[3].bias += 1e-4
    with pytest.raises(
        AssertionError, match=r"weights differ from those of one process by 0.0001; products are rounded to .*e-07 here"
    ):
        self_check_jobs._compared(module, "cpu")
    monkeypatch.setattr(self_check_jobs, "rounding", lambda kind: 4e-4)  # TF32
    assert self_check_jobs._compared(module, "cpu") == (
        "weights differ by 0.0001; products are rounded to 0.0004 here, which allows 0.003"
    )


def test_a_resume_that_loses_random_numbers_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_snapshot, "restore", lambda state: None)
    with pytest.raises(AssertionError, match="losses without interruption"):
        self_check_jobs.resume("cpu", RANKS)


def test_other_weights_are_found(folder: Path) -> None:
    self_check_jobs.single("cpu", RANKS)
    module = self_check_jobs.Net.load_from_checkpoint(self_check_jobs.REFERENCE)
    assert self_check_jobs._difference(module) == 0
    with torch.no_grad():
        module.net[3].bias += 0.5
    assert self_check_jobs._difference(module) == pytest.approx(0.5)
    assert (
        self_check_jobs._difference(self_check_jobs.trained(self_check_jobs.Net(), "cpu", RANKS, max_epochs=1)) > 1e-3
    )


@pytest.mark.slow
def test_this_installation(fit) -> None:
    ended = fit("test", "--json")
    found = json.loads(ended.out)
    assert [each["check"] for each in found] == list(CHECKS)
    assert {each["check"]: each["detail"] for each in found if each["ok"] is False} == {}
    assert ended.status == 0
