"""Values that a name has once reach the call that uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
from reported import changes, report_of

HEAD = "import argparse\nimport lightning.pytorch as pl\nfrom dataclasses import dataclass\nfrom functools import partial\n"
REFUSED = "model_registry"


@pytest.mark.parametrize(
    "text",
    [
        f"def f(n=2):\n    pl.Trainer({REFUSED}=n)",
        f"def f(*, n=2):\n    m = n\n    pl.Trainer({REFUSED}=m)",
        f"N = 2\ndef f():\n    pl.Trainer({REFUSED}=N)",
        f"options = dict({REFUSED}=2)\npl.Trainer(**options)",
        f"def f(n=2):\n    pl.Trainer(**{{'{REFUSED}': n}})",
        f"parser = argparse.ArgumentParser()\nparser.add_argument('--n', default=2)\nargs = parser.parse_args()\npl.Trainer({REFUSED}=args.n)",
        f"@dataclass\nclass Config:\n    n: int = 2\ndef f(config: Config):\n    pl.Trainer({REFUSED}=config.n)",
        f"class Runs:\n    def __init__(self, n=2):\n        self.n = n\n    def run(self):\n        pl.Trainer({REFUSED}=self.n)",
        f"class Mine(pl.Trainer):\n    def __init__(self, n=2, **options):\n        super().__init__({REFUSED}=n, **options)",
        f"class Mine(pl.Trainer): ...\nMine({REFUSED}=2)",
        f"class Mine(pl.Trainer):\n    def __init__(self, a, **options):\n        super().__init__(**options)\nMine(1, {REFUSED}=2)",
        f"partial(pl.Trainer, {REFUSED}=2)",
    ],
)
def test_a_value_that_reaches_a_trainer(tmp_path: Path, text: str) -> None:
    (sentence,) = changes(tmp_path, f"{HEAD}{text}\n").values()
    assert f"{REFUSED}=2" in sentence


@pytest.mark.parametrize(
    "text",
    [
        f"def f(n=2):\n    n = n or 0\n    pl.Trainer({REFUSED}=n)",
        f"def f(n=2):\n    if n == 0:\n        pl.Trainer({REFUSED}=n)",
        f"N = 2\ndef f(N):\n    pl.Trainer({REFUSED}=N)",
        f"N = 2\nN = 0\npl.Trainer({REFUSED}=N)",
        f"options = dict({REFUSED}=2)\noptions.pop('{REFUSED}')\npl.Trainer(**options)",
        "def f(monitor=None):\n    pl.callbacks.EarlyStopping(monitor)",
        f"class R:\n    def __init__(self, n=2):\n        self.n = n\n    def f(self):\n        self.n = 0\n        pl.Trainer({REFUSED}=self.n)",
    ],
)
def test_a_value_that_is_not_known(tmp_path: Path, text: str) -> None:
    assert changes(tmp_path, f"{HEAD}{text}\n") == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("torch.load(checkpoint.best_model_path)", 1),
        ("path = trainer.checkpoint_callback.last_model_path\ntorch.load(str(path), weights_only=False)", 1),
        ("from torch import load\nload(f=checkpoint.best_model_path)", 1),
        ("trainer.save_checkpoint('mine.ckpt')\ntorch.load('mine.ckpt')", 1),
        ("class Runs:\n    def f(self):\n        self.best = c.best_model_path\n        torch.load(self.best)", 1),
        ("torch.load('pretrained.ckpt')", 0),
        ("import shutil\nshutil.copytree(checkpoint.best_model_path, 'x')", 0),
        ("pl.callbacks.ModelCheckpoint.pickles = True\ntorch.load(checkpoint.best_model_path)", 0),
    ],
)
def test_a_checkpoint_that_torch_opens(tmp_path: Path, text: str, count: int) -> None:
    found = changes(tmp_path, f"import torch\n{HEAD}{text}\n")
    assert list(found) == ["torch.load()"] * count
    assert all("pickles = True" in sentence for sentence in found.values())


@pytest.mark.parametrize(
    "call",
    [
        "shutil.copy(c.best_model_path, 'x')",
        "shutil.copyfile(src=c.best_model_path, dst='x')",
        "os.remove(c.last_model_path)",
        "open(c.best_model_path, 'rb')",
    ],
)
def test_a_checkpoint_that_is_taken_for_a_file(tmp_path: Path, call: str) -> None:
    (sentence,) = changes(tmp_path, f"import os, shutil\n{HEAD}{call}\n").values()
    assert "a checkpoint is a folder" in sentence


def test_torch_is_known_within_a_package(tmp_path: Path) -> None:
    """Another file of the package does not hide it."""
    text = "import torch\nfrom lightning.pytorch.callbacks import ModelCheckpoint\ntorch.load(ModelCheckpoint().best_model_path)\n"
    report = report_of(tmp_path, pkg__sub__net=text, pkg__sub__other="")
    assert [use.name for use in report.uses if use.verdict == "change"] == ["torch.load()"]
