"""``fit config``: what it writes, what it refuses, and its questions in a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from support.internals import resolved_settings

from engine import strategies
from engine.cli.config import QUESTIONS, ask
from engine.cli.main import main
from engine.config.resolve import Resolved
from engine.config.settings import Settings
from engine.config.settings_file import CODE_ONLY, document, documentation
from engine.strategies.deepspeed import DeepSpeed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str, path: Path) -> Resolved:
    path.write_text(text)
    return resolved_settings({}, {}, path)


def test_every_setting_is_documented_once() -> None:
    told = documentation()
    assert [field.name for field in fields(Settings) if not told.get(field.name)] == []
    text = document({})
    for name in (field.name for field in fields(Settings) if field.name not in CODE_ONLY):
        assert text.count(f"\n# {name}: ") == 1


def test_the_default_file_is_all_comments_and_its_defaults_are_right(in_tmp: Path) -> None:
    assert main(["config", "--default"]) == 0
    text = Path("fit.yaml").read_text()
    assert set(resolved_settings({}, {}, Path("fit.yaml")).origins.values()) == {"default"}
    names = [field.name for field in fields(Settings) if field.name not in CODE_ONLY]
    for name in names:
        text = text.replace(f"\n# {name}: ", f"\n{name}: ")
    found = read(text, in_tmp / "open.yaml")
    assert found.settings == Settings()
    assert [name for name, origin in found.origins.items() if origin != "default"] == names


def test_what_is_written_is_read_as_the_same(in_tmp: Path) -> None:
    values = {
        "strategy": {
            "name": "mesh",
            "tp": 2,
            "plan": {"layers.*.up": "colwise", "no": "rowwise"},
            "split": ["layers.6"],
        },
        "precision": "no",
        "max_time": "10:00:00:00",
        "gradient_clip_val": 1e-3,
        "accumulate_grad_batches": {0: 1, 4: 2},
        "compile": {"blocks": True, "mode": "max-autotune"},
        "devices": [0, 1],
        "root_dir": "2024 # 'runs'",
        "val_every": None,
    }
    found = read(document(values), in_tmp / "a.yaml").settings
    assert found == Settings(**values)
    assert found.strategy.options["plan"] == values["strategy"]["plan"]  # type: ignore[index]


def test_a_file_is_not_overwritten_unless_it_is_asked_for(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("fit.yaml").write_text("seed: 1\n")
    Path("fit.yaml").chmod(0o640)
    assert main(["config", "--default"]) == 2
    assert "--force" in capsys.readouterr().err
    assert Path("fit.yaml").read_text() == "seed: 1\n"
    assert main(["config", "--default", "--force"]) == 0
    assert Path("fit.yaml").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in in_tmp.iterdir()] == ["fit.yaml"]  # no draft is left


def test_check(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text("seed: 1\nmodel: {width: 3}\nstrategy:\n  name: fsdp\n  cpu_ofload: true\n")
    assert main(["config", "--check", "a.yaml"]) == 1
    assert "file a.yaml:5: 'fsdp' has no setting 'cpu_ofload'; did you mean 'cpu_offload'" in capsys.readouterr().err
    Path("a.yaml").write_text("seed: 1\nmodel: {width: 3}\n")
    assert main(["config", "--check", "a.yaml"]) == 0
    assert (
        capsys.readouterr().out
        == "a.yaml: 1 setting(s), all valid: seed\na.yaml: model: read by 'fit run', not checked here\n"
    )


def test_without_a_terminal_it_says_what_to_give(in_tmp: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "engine.cli.main", "config"]
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    assert "--default" in done.stderr
    assert list(in_tmp.iterdir()) == []


def test_questions_in_a_terminal(in_tmp: Path) -> None:
    """A real terminal: the question is awaited, then answered. A wrong answer is asked for again, and the rest are defaults."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.cli.main", "config"],
        env=environ,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        close_fds=True,
    )
    os.close(terminal)
    script = [
        ("Strategy:", "depspeed", "did you mean 'deepspeed'"),
        ("Strategy:", "deepspeed", ""),
        ("ZeRO stage", "three", "strategy.stage='three' is of type str"),
        ("ZeRO stage", "5", "is not a ZeRO stage"),
        ("ZeRO stage", "3", ""),
        ("Precision:", "bf16", ""),
        ("Largest gradient norm", "?", "null or 0: no clipping"),
        ("Largest gradient norm", "0.5", ""),
    ]
    told = _talk(controller, script)
    assert process.wait(300) == 0, told
    for _, _, reply in script:
        assert reply in told
    found = resolved_settings({}, {}, Path("fit.yaml"))
    assert found.settings == Settings(
        strategy={"name": "deepspeed", "stage": 3}, precision="bf16-mixed", gradient_clip_val=0.5
    )
    assert strategies.describe(strategies.get(found.settings.strategy), None) == strategies.describe(
        DeepSpeed(stage=3), None
    )


def _talk(controller: int, script: list[tuple[str, str, str]]) -> str:
    """Answer each question as the script has it, others by Enter, until the program ends."""
    told, asked, answers = "", 0, list(script)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if not select.select([controller], [], [], 1)[0]:
            continue
        try:
            piece = os.read(controller, 4096).decode()
        except OSError:  # the other side was closed
            break
        told += piece
        while (end := told.find("]: ", asked)) >= 0:
            question = told[asked:end]
            asked = end + 3
            answer = ""
            if answers and answers[0][0] in question.splitlines()[-1]:
                answer = answers.pop(0)[1]
            os.write(controller, f"{answer}\n".encode())
    os.close(controller)
    return told


def test_defaults_are_no_settings_and_each_option_exists() -> None:
    assert ask(lambda question: "", lambda text: None) == {}
    for name in ("ddp", "fsdp", "mesh", "deepspeed"):
        answers = {
            "Strategy": name,
            "Precision": "fp8-mixed",
            "Keep optimizer states": "nvme",
            "Directory": "/fast",
            "ZeRO": "3",
        }
        seen: list[str] = []

        def answer(question: str, answers: dict[str, str] = answers, seen: list[str] = seen) -> str:
            seen.append(question)
            assert seen.count(question) < 3, question
            return (
                "?"
                if seen.count(question) == 1
                else next((text for start, text in answers.items() if question.startswith(start)), "")
            )

        found = ask(answer, lambda text: None)
        assert (found["strategy"]["name"] if isinstance(found["strategy"], dict) else found["strategy"]) == name
        assert len(seen) == 2 * len(set(seen))
    assert found["strategy"] == {"name": "deepspeed", "stage": 3, "offload_optimizer": "nvme", "nvme_path": "/fast"}
    assert {question.name.partition(".")[0] for question in QUESTIONS} <= {field.name for field in fields(Settings)}
