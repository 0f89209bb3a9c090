from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

from support.ranks import PATIENCE_S, clean_environment

from engine.strategies.deepspeed.driven_model import REQUIREMENT

CODE = """
import torch
from engine import Fit, TrainModule

class Net(TrainModule):
    def training_step(self, batch, batch_idx):
        raise SystemExit("it trains")

Fit(strategy="deepspeed", accelerator="cpu").run(Net(), [torch.ones(1)])
"""


def test_it_is_that_of_the_extra() -> None:
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[3] / "setup.cfg")
    assert setup["options.extras_require"]["deepspeed"].strip() == REQUIREMENT


def test_another_version_is_an_error_before_training(tmp_path: Path) -> None:
    """A package of another version comes first on the path."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise SystemExit('it was imported')\n")
    meta = tmp_path / "deepspeed-0.10.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.10.0\n")
    environment = clean_environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment.get('PYTHONPATH', '')}"
    ran = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert f'it needs {REQUIREMENT}, found 0.10.0: pip install "fit-trainer[deepspeed]"' in ran.stderr
