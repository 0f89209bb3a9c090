"""``--checkpoint`` and ``--resume``: the module is made as the one that was saved."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from engine import TrainModule
from engine.cli.class_paths import importable_here, load
from engine.cli.object_builder import ObjectBuilder
from engine.cli.requested_objects import Component
from engine.cli.saved_parameters import Recorded, with_saved_parameters
from engine.cli.terminal import UsageError

NETS = '''
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from engine import DataModule, TrainModule


class Kind(Enum):
    PLAIN = 1
    FANCY = 2


@dataclass
class Options:
    scale: float = 1.0
    names: tuple[str, ...] = ()


class Base(TrainModule):
    """Its weights stay as they are: ``rows`` x 2 times ``scale``."""

    def build(self, width: int, scale: float = 1.0) -> None:
        self.w = nn.Parameter(torch.full((width, 2), 3.0))
        self.scale = scale

    def training_step(self, batch, batch_idx):
        return (self.w * 0).sum() + batch.sum() * 0

    def test_step(self, batch, batch_idx):
        self.log("rows", float(len(self.w)))
        self.log("scale", self.scale)

    def predict_step(self, batch, batch_idx):
        return batch * self.scale

    validation_step = test_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Net(Base):
    """Saves none itself."""

    def __init__(self, width: int = 2, scale: float = 1.0, options: Options = Options(), kind: Kind = Kind.PLAIN,
                 widths: list[int] = [1], layer: nn.Module | None = None, anything=None, loose: dict | None = None):
        super().__init__()
        self.build(width, scale * options.scale * (10 if kind is Kind.FANCY else 1) * sum(widths))
        self.layer = layer


class Saves(Base):
    def __init__(self, width: int, scale: float = 1.0):
        super().__init__()
        self.save_hyperparameters()
        self.build(width, scale)


class Configured(Base):
    def __init__(self, config: dict):
        super().__init__()
        self.save_hyperparameters(config)
        self.build(config["width"], config.get("scale", 1.0))


class Bare(Base):
    """Its hyperparameters are in no checkpoint."""

    width = 2

    def __init__(self):
        super().__init__()
        self.build(self.width)


class Numbers(DataModule):
    def __init__(self, count: int = 4):
        super().__init__()
        self.count = count

    def train_dataloader(self):
        return [torch.ones(1, 1)] * self.count

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader
'''


@pytest.fixture
def nets(here: Path) -> None:
    (here / "nets.py").write_text(NETS)


def run(fit: Any, target: str, *settings: str) -> None:
    ended = fit(
        "run",
        target,
        "--data",
        "nets:Numbers",
        "--callback",
        "ModelCheckpoint",
        "--set",
        "num_sanity_val_steps=0",
        *settings,
    )
    assert ended.status == 0, ended.err


def metrics_of(fit: Any, target: str, *more: str, command: str = "test") -> Any:
    ended = fit(command, target, "--data", "nets:Numbers", "--json", *more)
    return (json.loads(ended.out)[0] if ended.status == 0 else None), ended.err


def found(fit: Any, target: str, *more: str, command: str = "test") -> tuple[float, float]:
    metrics, err = metrics_of(fit, target, *more, command=command)
    assert metrics is not None, err
    return metrics["rows"], metrics["scale"]


@pytest.mark.parametrize("checkpoint", ["last", "runs", "runs/checkpoints/step=00000002", "best"])
@pytest.mark.parametrize("target", ["nets:Net", "nets.py:Saves"])
def test_a_module_is_made_as_the_saved_one(
    fit, nets: None, target: str, checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    score = ("callbacks.0.monitor=rows", "callbacks.0.mode=max") if checkpoint == "best" else ()
    run(fit, target, "model.width=5", "model.scale=2", "data.count=2", *score)
    with caplog.at_level(logging.INFO, "engine"):
        assert found(fit, target, "--checkpoint", checkpoint) == (5.0, 2.0)
    assert "from the checkpoint" in caplog.text
    assert "width=5, scale=2.0" in caplog.text
    if checkpoint == "last":
        assert found(fit, target, "--checkpoint", checkpoint, command="validate") == (5.0, 2.0)
        assert (
            fit("predict", target, "--data", "nets:Numbers", "--checkpoint", "last", "--output", "out.jsonl").status
            == 0
        )
        assert Path("out.jsonl").read_text() == "[2.0]\n" * 4


def test_a_run_that_goes_on_has_the_same_module(fit, nets: None, here: Path) -> None:
    assert (
        fit("run", "nets:Net", "--data", "nets:Numbers", "--resume", "auto", "--set", "model.width=3").status == 0
    )  # there is none yet
    run(fit, "nets:Net", "model.width=5", "model.scale=2")
    run(fit, "nets:Net", "max_epochs=2", "--resume", "last")
    assert found(fit, "nets:Net", "--checkpoint", "last") == (5.0, 2.0)


def test_what_is_given_wins_and_the_difference_is_said(
    fit, nets: None, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(fit, "nets:Net", "model.width=5", "model.scale=2")
    assert found(fit, "nets:Net", "--checkpoint", "last", "--set", "model.scale=7") == (5.0, 7.0)
    assert "command line model.scale: using model.scale=7.0, not the 2.0 of" in caplog.text
    data = "data:\n  class_path: nets:Numbers\n  init_args: {count: 2}\n"
    (here / "fit.yaml").write_text(f"model:\n  class_path: nets:Net\n  init_args:\n    scale: 4.0\n{data}")
    caplog.clear()
    ended = fit("test", "--checkpoint", "last", "--json")
    assert json.loads(ended.out)[0] == {"rows": 5.0, "scale": 4.0}
    assert "file fit.yaml:4: using model.scale=4.0, not the 2.0 of" in caplog.text
    assert (
        "using data.count=2, not the 4 of" in caplog.text
    )  # a data module has its own parameters, or those that are given


def test_enums_dataclasses_and_lists_come_back(fit, nets: None) -> None:
    run(fit, "nets:Net", "model.kind=FANCY", "model.options.scale=3", "model.options.names=[a]", "model.widths=[2,2]")
    assert found(fit, "nets:Net", "--checkpoint", "last") == (2.0, 10 * 3.0 * 4)
    # A part of a value, too: the rest of it is the checkpoint's.
    assert found(fit, "nets:Net", "--checkpoint", "last", "--set", "model.options.names=[b]") == (2.0, 10 * 3.0 * 4)
    assert found(fit, "nets:Net", "--checkpoint", "last", "--set", "model.widths+=1") == (2.0, 10 * 3.0 * 5)


def test_what_names_code_is_asked_for(fit, nets: None, here: Path) -> None:
    run(
        fit,
        "nets:Net",
        "model.width=5",
        "model.layer=torch.nn.Linear",
        "model.layer.in_features=2",
        "model.layer.out_features=3",
    )
    given = "model.layer={class_path: torch.nn.Linear, init_args: {in_features: 2, out_features: 3, bias: true, device: null, dtype: null}}"
    metrics, err = metrics_of(fit, "nets:Net", "--checkpoint", "last")
    assert metrics is None
    assert f"Give it, as in --set '{given}'" in err
    assert found(fit, "nets:Net", "--checkpoint", "last", "--set", given) == (5.0, 1.0)


HOSTILE: list[tuple[str, Any]] = [
    ("layer", {"class_path": "evil.Evil"}),
    ("layer", "evil.Evil"),
    ("anything", {"class_path": "evil.Evil"}),
    ("anything", "evil.Evil"),
    ("options", "hostile.yaml"),
    ("options", {"scale": {"class_path": "evil.Evil"}}),
    ("widths", [{"class_path": "evil.Evil"}]),
    ("widths", "hostile.yaml"),
    ("kind", {"class_path": "evil.Evil"}),
    ("loose", {"a": [{"class_path": "evil.Evil"}]}),
]


@pytest.mark.parametrize(("name", "value"), HOSTILE)
def test_a_hostile_checkpoint_names_no_code_and_no_file(nets: None, here: Path, name: str, value: Any) -> None:
    (here / "evil.py").write_text("open('pwned', 'w')\nclass Evil: pass\n")
    (here / "hostile.yaml").write_text("scale: 3\n")
    importable_here()
    part = Component("model", "nets:Net", load("nets:Net", "the target", TrainModule))
    with pytest.raises(UsageError, match="is not taken from a checkpoint"):
        ObjectBuilder(
            with_saved_parameters(part, Recorded("there", {}, None, {}, {"model": {name: value}, "data": {}}))
        ).build()
    assert not (here / "pwned").exists()


def test_a_hidden_secret_is_no_value(nets: None) -> None:
    importable_here()
    hidden = {"config": {"width": 2, "token": "***", "place": "s3://***@host/runs"}}
    saved = Recorded("there", {}, None, {}, {"model": hidden, "data": {}})

    def built(*overrides: tuple[str, str]) -> TrainModule:
        target = load("nets:Configured", "the target", TrainModule)
        part = Component("model", "nets:Configured", target, overrides=list(overrides))
        module: TrainModule = ObjectBuilder(with_saved_parameters(part, saved)).build()[0]
        return module

    text = "checkpoint there: model.config is .* was written in place of a secret: give the value, as in --set model.config=VALUE"
    for overrides in ([], [("config.token", "abc")]):
        with pytest.raises(UsageError, match=text):
            built(*overrides)
    given = ("config.token", "abc"), ("config.place", "s3://me:pass@host/runs")
    assert dict(built(*given).hparams) == {"width": 2, "token": "abc", "place": "s3://me:pass@host/runs"}


def test_one_dict_for_all(fit, nets: None, here: Path) -> None:
    run(fit, "nets:Configured", "model.config={width: 5, scale: 2.0}")
    assert found(fit, "nets:Configured", "--checkpoint", "last") == (5.0, 2.0)
    assert found(fit, "nets:Configured", "--checkpoint", "last", "--set", "model.config.scale=3.0") == (5.0, 3.0)
    assert found(fit, "nets:Configured", "--checkpoint", "last", "--set", "model.config={width: 5}") == (5.0, 1.0)


def test_without_hyperparameters_the_error_says_what_to_pass(fit, nets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run(fit, "nets:Bare")
    import nets as module  # type: ignore[import-not-found]

    monkeypatch.setattr(module.Bare, "width", 3)
    _, err = metrics_of(fit, "nets:Bare", "--checkpoint", "last")
    assert "of another shape: w ([2, 2] there, [3, 2] here)" in err
    assert (
        "it has no hyperparameters (save_hyperparameters): create the module with the arguments that it was trained with"
        in err
    )
    assert "--set model.NAME=VALUE" in err


def test_other_arguments_that_do_not_fit_are_named(fit, nets: None) -> None:
    run(fit, "nets:Saves", "model.width=5")
    _, err = metrics_of(fit, "nets:Saves", "--checkpoint", "last", "--set", "model.width=4")
    assert "it was created with width=5; give the module's arguments as --set model.NAME=VALUE" in err


def test_the_printed_configuration_has_them(fit, nets: None) -> None:
    run(fit, "nets:Net", "model.width=5")
    printed = fit("test", "nets:Net", "--data", "nets:Numbers", "--checkpoint", "last", "--print-config").out
    assert "    width: 5\n" in printed


def test_a_checkpoint_that_is_not_there_is_an_error(fit, nets: None) -> None:
    _, err = metrics_of(fit, "nets:Saves", "--checkpoint", "last")
    assert "checkpoint='last': no complete checkpoint in" in err
