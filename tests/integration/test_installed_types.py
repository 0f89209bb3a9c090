"""After the README's ``pip install -e``, type checkers find our types: in an environment of its own, with what an installation leaves there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]
USER = """\
from callbacks import EarlyStopping
from engine import Engine, Fit, TrainModule
from engine.callbacks import EarlyStopping as Same

reveal_type(Fit(max_epochs=3).is_main_process)
reveal_type(Engine().num_processes)
reveal_type(EarlyStopping("loss").wait_count)
reveal_type(Same("loss").patience)
Fit(max_epochs="three")
Fit().run(TrainModule(), ckpt_path="last")
Fit().fit
"""
FOUND = """\
user.py:5: note: Revealed type is "bool"
user.py:6: note: Revealed type is "int"
user.py:7: note: Revealed type is "int"
user.py:8: note: Revealed type is "int | float"
user.py:9: error: Argument "max_epochs" to "Fit" has incompatible type "str"; expected "int | None"  [arg-type]
user.py:10: error: Argument "ckpt_path" to "run" of "Fit" has incompatible type "str"; expected "Never"  [arg-type]
user.py:11: error: "Fit" has no attribute "fit"  [attr-defined]
"""


@pytest.mark.slow
def test_mypy_finds_the_types_of_an_editable_installation(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    copy, home, tools = tmp_path / "copy", tmp_path / "venv", tmp_path / "tools"
    for name in ("engine", "callbacks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "setup.cfg", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    venv.create(home, with_pip=True)
    tools.mkdir()  # setuptools alone, without a network and without what else is installed here
    packages = Path(setuptools.__file__).parent.parent
    for found in (packages / "setuptools", *packages.glob("setuptools-*.dist-info")):
        (tools / found.name).symlink_to(found)
    install = [
        str(home / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-e",
        str(copy),
    ]
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    subprocess.run(
        install, check=True, timeout=300, env={**clean, "PYTHONPATH": str(tools), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    )
    (tmp_path / "user.py").write_text(USER)
    check = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file=",
        f"--cache-dir={tmp_path / 'cache'}",
        "--python-executable",
        str(home / "bin" / "python"),
    ]
    done = subprocess.run(
        [*check, "--hide-error-context", "user.py"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines(keepends=True) if " error: " in line or "Revealed" in line]
    assert "".join(lines) == FOUND, done.stdout + done.stderr
