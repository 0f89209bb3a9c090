"""``fit migrate``: its options and exit statuses. What it reports is tested in ``tests/compat/migrate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.cli.main import main

GOOD = "import lightning as L\nclass Net(L.LightningModule):\n    width = 1\n"
OLD = "    def training_epoch_end(self, outputs): ...\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose module needs a change, and whose import would fail."""
    (tmp_path / "pkg" / "tests").mkdir(parents=True)
    (tmp_path / "pkg" / "__init__.py").write_text("raise SystemExit('this is never run')\n")
    (tmp_path / "pkg" / "net.py").write_text(GOOD + OLD)
    (tmp_path / "pkg" / "tests" / "test_net.py").write_text(GOOD.replace("Net", "TestNet"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_text(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "pkg"]) == 0
    out = capsys.readouterr().out
    assert "class Net (LightningModule): needs a change" in out
    assert "line 4: def training_epoch_end: it is never called" in out
    assert "class TestNet (LightningModule): works as is" in out
    assert main(["migrate", "pkg", "--changes", "--exclude", "test*"]) == 0
    assert "TestNet" not in capsys.readouterr().out


def test_json(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "pkg/net.py", "pkg/tests", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["name"]: each["verdict"] for each in found["classes"]} == {"Net": "change", "TestNet": "as is"}


def test_exit_statuses(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "pkg", "--check"]) == 1
    assert main(["migrate", "pkg/tests", "--check"]) == 0
    (package / "pkg" / "tests" / "bad.py").write_text("class:\n")
    assert main(["migrate", "pkg/tests"]) == 0
    assert "not read: pkg/tests/bad.py:1: not valid Python" in capsys.readouterr().out
    assert main(["migrate", "pkg/tests", "--check"]) == 1
    assert main(["migrate", "nowhere"]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    (package / "empty").mkdir()
    assert main(["migrate", "empty"]) == 2
    assert "empty: there are no .py or .ipynb files" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["migrate"])
    assert end.value.code == 2
