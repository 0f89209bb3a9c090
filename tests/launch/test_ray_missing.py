from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml
from support.ranks import ROOT, clean_environment


def test_without_ray_the_extra_is_named(tmp_path: Path) -> None:
    """A Python that has nothing but what the command needs for its start."""
    (tmp_path / "yaml").symlink_to(Path(yaml.__file__).parent)
    (tmp_path / "train.py").touch()
    environ = clean_environment() | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, "-S", "-m", "engine.cli.main", "launch", "--ray", "train.py"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert 'Ray is not installed; install it with: pip install "fit-trainer[ray]"' in done.stderr
