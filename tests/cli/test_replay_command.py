"""``fit replay``: a step of an earlier run, whose checkpoint names code that is not run unless that was allowed; and its errors."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import resummed
from support.ranks import clean_environment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from callbacks import CSVLogger, ModelCheckpoint, Report
from engine import Callback, Fit, TrainModule, seed_everything
from engine.cli.main import main


class Line(TrainModule):
    def __init__(self, slope: float = 0.0, lr: float = 0.25) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.weight = nn.Parameter(torch.tensor(slope))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.weight * batch).sum()
        self.log("loss", loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def numbers(count: int = 8) -> DataLoader[Tensor]:
    return DataLoader(torch.arange(1.0, count + 1), 2)  # type: ignore[arg-type]


class Still(Callback):
    """Could change a step."""


HERE = f"{__file__}:Line"
DATA = f"{__file__}:numbers"
GIVEN = ["--target", HERE, "--data", DATA]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Weights of steps 0 to 4: 0, -0.75, -2.5, -5.25, -9; checkpoints of steps 2 and 4."""
    return trained(tmp_path)


class Unannotated(Line):
    """Its parameters have no types, so jsonargparse looks for a stub file, with the help of another Python."""

    def __init__(self, slope=0.0, lr=0.25):  # type: ignore[no-untyped-def]
        super().__init__(slope, lr)


def trained(root: Path, *more: str) -> Path:
    options = [
        "--callback",
        "ModelCheckpoint",
        "--callback",
        "CSVLogger",
        "--set",
        f"root_dir={root}",
        "log_every_n_steps=4",
    ]
    saves = ["callbacks.ModelCheckpoint.every=2", "callbacks.ModelCheckpoint.save_top_k=-1"]
    assert main(["run", HERE, "--data", DATA, *options, *saves, *(more or ("max_epochs=1",))]) == 0
    return root


def test_a_step_of_a_run_with_the_code_that_is_given(
    made: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    capfd.readouterr()
    caplog.clear()
    assert main(["replay", str(made), "--step", "4", "--json", *GIVEN]) == 0
    assert not [record.message for record in caplog.records if record.levelname == "WARNING"]
    found = json.loads(capfd.readouterr().out)
    assert found["samples"] == [6, 7]
    assert found["losses"] == [[-5.25 * 15]]
    assert (found["grad_norm"], found["grad_norms"]) == (15.0, {"weight": 15.0})
    assert found["metrics"] == {"loss": -5.25 * 15}
    assert found["recorded"] == {"loss": -5.25 * 15}
    assert main(["replay", str(made), "--step", "3", "--per-layer", "--detect-anomaly", *GIVEN]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines == [
        f"step 3 (epoch 0) from {made}/checkpoints/step=00000002, 1 rank(s)",
        "samples: 4, 5",
        "rank 0, micro-batch 0: loss -27.5",
        "logged: loss = -27.5",
        "not verified: up to this step the run recorded no finite value that the replay logs, too. Report and CSVLogger record what training_step "
        "logs; log_every_n_steps=1 records every step",
        "gradient norm: 11.0",
        "  weight  11",
        "first number that is not finite: none",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--step", "2"],
            "no checkpoint from before this step, so the training has to start again, and without a seed",
        ),
        (["--step", "0"], "steps are numbered from 1"),
        (["--step", "9"], "the run ends at step 4: max_epochs=1 reached"),
        (["--step", "4", "--set", "model.lrr=1"], "lrr"),
    ],
)
def test_what_cannot_be_replayed(
    made: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["replay", str(made), *GIVEN, *arguments]) != 0
    assert words in capfd.readouterr().err


def test_a_run_of_a_script_needs_the_target(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saves = ModelCheckpoint(every=2, save_top_k=-1)
    Fit(max_epochs=1, root_dir=tmp_path, callbacks=saves).run(Line(slope=1.0), numbers())
    assert main(["replay", str(tmp_path), "--step", "4"]) == 2
    assert "name its module with --target and its data with --data" in capfd.readouterr().err
    assert main(["replay", str(tmp_path), "--step", "4", *GIVEN, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["losses"] == [[(1 - 5.25) * 15]]


def test_its_loss_is_compared_with_the_recorded_one(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(made), "--step", "4", *GIVEN]) == 0
    assert "logged: loss = -78.75, as recorded" in capfd.readouterr().out
    table = made / "metrics.csv"
    table.write_text(table.read_text().replace("-78.75", "-78.5"))
    assert main(["replay", str(made), "--step", "4", *GIVEN]) == 0
    assert "logged: loss = -78.75, recorded: -78.5 (differs by 0.25)" in capfd.readouterr().out


def test_a_step_of_a_resumed_run_has_the_settings_with_which_it_ran(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path)
    more = ["--callback", "ModelCheckpoint", "--callback", "CSVLogger", "--resume", "last"]
    again = ["max_epochs=3", "log_every_n_steps=1", "accumulate_grad_batches=2"]
    assert main(["run", HERE, "--data", DATA, *more, "--set", f"root_dir={tmp_path}", *again]) == 0
    capfd.readouterr()
    assert (
        main(["replay", str(tmp_path), "--step", "5", *GIVEN]) == 0
    )  # the first of the second epoch, two micro-batches
    lines = capfd.readouterr().out.splitlines()
    assert lines[1] == "samples: 0, 1, 2, 3"
    assert lines[4] == f"logged: loss = {-9 * 5.0}, as recorded"


def test_parameters_are_the_runs_where_nothing_else_is_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, "max_epochs=1", "data.count=16", "model.slope=1.0")
    capfd.readouterr()
    assert main(["replay", str(tmp_path), "--step", "8", "--json", *GIVEN]) == 0
    assert json.loads(capfd.readouterr().out)["samples"] == [14, 15]
    file = tmp_path / "mine.yaml"
    file.write_text(f"data: {DATA}\nmodel:\n  class_path: {HERE}\n  init_args: {{lr: 0.5}}\nmax_epochs: 2\n")
    assert main(["replay", str(tmp_path), "--step", "5", "--json", "--config", str(file)]) == 0
    assert json.loads(capfd.readouterr().out)["samples"] == [8, 9]
    assert "using model.lr=0.5, not the 0.25" in caplog.text


def test_callbacks_of_the_run_that_may_change_a_step_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = ModelCheckpoint(every=2, save_top_k=-1)
    Fit(max_epochs=1, root_dir=tmp_path, callbacks=[saves, CSVLogger(), Still()]).run(Line(), numbers())
    caplog.clear()
    assert main(["replay", str(tmp_path), "--step", "4", *GIVEN]) == 0
    assert "names callbacks that are not given here: Still; if one" in caplog.text
    caplog.clear()
    assert main(["replay", str(tmp_path), "--step", "4", *GIVEN, "--callback", f"{__file__}:Still"]) == 0
    assert not [record.message for record in caplog.records if record.levelname == "WARNING"]


def hostile(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the settings in every manifest of a run."""
    for path in run.glob("checkpoints/*/manifest.json"):
        manifest = json.loads(path.read_text())
        change(manifest["config"])
        path.write_text(json.dumps(resummed(manifest)))


class Drawn(Line):
    """Its first weight is drawn when it is made."""

    def __init__(self, lr: float = 0.25) -> None:
        super().__init__(float(torch.randn(1)), lr)


@pytest.mark.parametrize("logger", ["CSVLogger", "Report"])
def test_a_run_without_checkpoints_is_repeated_from_its_seed(
    tmp_path: Path, logger: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """With the settings and the parameters that a logger has recorded."""
    target = ["--target", f"{__file__}:Drawn", "--data", DATA]
    settings = [
        "max_epochs=2",
        "seed=3",
        "log_every_n_steps=1",
        "accumulate_grad_batches=2",
        "data.count=16",
        "model.lr=0.5",
    ]
    command = ["run", target[1], *target[2:], "--callback", logger, "--set", f"root_dir={tmp_path}", *settings]
    assert main(command) == 0
    capfd.readouterr()
    assert main(["replay", str(tmp_path), "--step", "3", *target]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "step 3 (epoch 0) from the start, 1 rank(s)"
    assert lines[1] == "samples: 8, 9, 10, 11"
    assert lines[4].startswith("logged: loss = ")
    assert lines[4].endswith(", as recorded")
    assert (
        lines[5]
        == "verified: the values that the run recorded up to this step are the same to the last bit (3 of loss)"
    )
    assert not [record.message for record in caplog.records if "differ" in record.message]
    assert main(["replay", str(tmp_path), "--step", "3", *target, "--set", "seed=4"]) == 2
    assert "the run had seed=3, not 4" in capfd.readouterr().err
    assert main(["replay", str(tmp_path / "nowhere"), "--step", "3", *target]) == 2


class Breaking(Drawn):
    """Its loss is NaN in step 3."""

    logs = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.weight * batch).sum() * (math.nan if batch_idx == 2 else 1.0)
        if self.logs:
            self.log("loss", loss.detach())
        return loss


@pytest.mark.parametrize(("seed", "every"), [(5, 1), (5, 50), (3, 1), (3, 50), (5, 0)])
def test_a_nan_from_other_weights_is_not_called_the_runs(
    seed: int, every: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script makes the module under a seed of its own, before the ``Fit``."""
    monkeypatch.setattr(Breaking, "logs", every > 0)
    seed_everything(seed)
    module = Breaking()
    settings: dict[str, Any] = {"max_epochs": 1, "seed": 3, "log_every_n_steps": every or 1, "accelerator": "cpu"}
    Fit(**settings, root_dir=tmp_path, callbacks=Report()).run(module, numbers())
    capfd.readouterr()
    target = ["--target", f"{__file__}:Breaking", "--data", DATA]
    assert main(["replay", str(tmp_path), "--step", "3", *target]) == 0
    text = capfd.readouterr().out
    assert ("logged: loss = nan, recorded: not finite either" in text) is (every == 1)
    assert "as recorded" not in text
    counts = {1: 2, 50: 1}  # the first step is always recorded
    if not every:
        assert "not verified: up to this step the run recorded no finite value" in text
        assert "it is the run's step only if the module began with the same weights" in text
    elif seed == 3:
        assert f"the same to the last bit ({counts[every]} of loss)" in text
    else:
        assert "THIS IS NOT THE RUN'S STEP: at step 1 loss = " in text
    assert main(["replay", str(tmp_path), "--step", "3", "--json", *target]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["equal"] == ({"loss": counts[every]} if seed == 3 else {})
    assert bool(answer["difference"]) is (seed == 5 and every > 0)


def test_a_run_that_has_left_nothing_is_told_as_such(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Fit(max_epochs=1, seed=3, accelerator="cpu", root_dir=tmp_path / "run").run(Line(), numbers())
    assert not (tmp_path / "run").exists()
    assert main(["replay", str(tmp_path / "run"), "--step", "3", *GIVEN]) == 2
    text = capfd.readouterr().err
    assert "or the run has left none: without ModelCheckpoint, Report or a logger nothing is written" in text
    assert "replay(module, loader, step=3)" in text


def test_a_record_of_a_run_without_checkpoints_runs_no_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = ["max_epochs=1", "seed=3", f"root_dir={tmp_path}"]
    assert main(["run", HERE, "--data", DATA, "--callback", "CSVLogger", "--set", *settings]) == 0
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("compile: false", "compile: {options: {cpp.cxx: touch x}}"))
    assert main(["replay", str(tmp_path), "--step", "2"]) == 2
    assert f"names --target {HERE} --data {DATA};" in capfd.readouterr().err
    assert main(["replay", str(tmp_path), "--step", "2", *GIVEN]) == 2
    assert "compile=" in capfd.readouterr().err
    config.write_text("seed: [")  # without its settings another step would be replayed
    assert main(["replay", str(tmp_path), "--step", "2", *GIVEN, "--set", "seed=3"]) == 2
    assert f"the settings of the run, {config}, cannot be read" in capfd.readouterr().err


@pytest.mark.slow
def test_two_ranks_say_each_line_once_and_stop_at_the_step(tmp_path: Path) -> None:
    fit = [sys.executable, "-m", "engine.cli.main"]
    settings = ["accelerator=cpu", "devices=2", f"root_dir={tmp_path / 'runs'}", "log_every_n_steps=1"]
    callbacks = [
        item
        for name in (f"{__file__}:Still", "LearningRateMonitor", "ModelCheckpoint")
        for item in ("--callback", name)
    ]
    more = ["max_epochs=1", "callbacks.ModelCheckpoint.every=3", "callbacks.ModelCheckpoint.save_top_k=-1"]
    data = ["--data", DATA, "--set", "data.count=128", *settings]
    environ = {**clean_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([*fit, "run", HERE, *data, *more, *callbacks], cwd=tmp_path, env=environ, check=True)
    given = ["--target", HERE, *data]
    command = [*fit, "replay", "runs", "--step", "5", *given]
    replayed = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    lines = replayed.stderr.splitlines()
    (warning,) = [line for line in lines if "names callbacks" in line]
    assert "not given here: Still; if one" in warning
    assert [line.partition(":")[0] for line in lines if line.startswith("epoch ")] == [
        "epoch 0 step 4",
        "epoch 0 step 5",
    ]
    assert "logged: loss = " in replayed.stdout


def test_a_run_runs_nothing_that_it_names(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = tmp_path / "ran"
    command = {"class_path": "subprocess.getoutput", "init_args": {"cmd": f"touch {proof}"}}
    (made / "beside.py").write_text(f"open({str(proof)!r}, 'w')")
    monkeypatch.chdir(made)  # what lies beside the run could be imported
    places: list[dict[str, Any]] = [
        {"model": command},
        {"model": {"class_path": "beside.py:Net"}},
        {"data": command},
        {"callbacks": [command]},
        {"callbacks": [{"class_path": "beside"}]},
        {"strategy": "beside:Strategy"},
        {"strategy": {"name": "deepspeed", "config": "beside.py"}},
        {"compile": {"options": {"cpp.cxx": f"touch {proof}"}}},
        {"precision": {"name": "beside.py"}},
        {"model": {"class_path": HERE, "init_args": {"lr": command}}},
        {"root_dir": str(tmp_path / "elsewhere")},
    ]
    for entries in places:
        hostile(made, lambda config, e=entries: config.update({n: {"value": v, "origin": "x"} for n, v in e.items()}))  # type: ignore[misc]
        step = ["--step", "4"]
        assert main(["replay", str(made), *step]) == 2
        main(["replay", str(made), *step, *GIVEN])
        main(["report", str(made)])
        for action in ("list", "show", "verify"):
            main(["checkpoint", action, str(made)])
        saved = str(made / "checkpoints" / "step=00000002")
        main(["run", HERE, "--data", DATA, "--resume", saved])
        main(["validate", HERE, "--data", DATA, "--checkpoint", saved])
        assert not proof.exists(), entries
        assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("module", ["Line", "Unannotated"])
def test_nothing_beside_a_run_is_imported_in_its_folder(module: str, made: Path, tmp_path: Path) -> None:
    """Not even as one of Python's own modules, or of an installed package, that is not loaded yet."""
    proof = tmp_path / "ran"
    installed = (name for name in packages_distributions() if name.isidentifier())
    for name in {*sys.stdlib_module_names, *installed, "sitecustomize", "docstring_parser", "triton"}:
        (made / f"{name}.py").write_text(f"open({str(proof)!r}, 'a').write('{name} ')")
    program = [sys.executable, "-P", "-c", "import sys; from engine.cli.main import main; sys.exit(main(sys.argv[1:]))"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [*program, "replay", ".", "--step", "4", "--json", "--target", f"{__file__}:{module}", "--data", DATA]
    ended = subprocess.run(command, cwd=made, env=environ, capture_output=True, text=True)
    assert not proof.exists(), proof.read_text()
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["losses"] == [[-78.75]]


def test_a_fit_yaml_of_the_run_is_not_read(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    proof = tmp_path / "ran"
    monkeypatch.chdir(made)
    Path("fit.yaml").write_text(f"model: {{class_path: subprocess.getoutput, init_args: {{cmd: touch {proof}}}}}")
    for run in (".", "checkpoints", "checkpoints/step=00000002", str(made)):
        for more in ([], GIVEN):
            assert main(["replay", run, "--step", "4", *more]) == 2
            assert "fit.yaml lies in the folder of the run" in capfd.readouterr().err
    Path("fit.yaml").write_text(f"model: {HERE}\ndata: {DATA}\n")
    assert main(["replay", ".", "--step", "4", "--config", "fit.yaml"]) == 0  # its user says so
    assert "PYTHONSAFEPATH" not in os.environ  # which other Pythons of this process would inherit
    assert not proof.exists()


def test_code_of_the_run_is_printed_before_it_runs_by_request(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert main(["replay", str(made), "--step", "4"]) == 2
    err = capfd.readouterr().err
    assert f"names --target {HERE} --data {DATA};" in err
    assert "--run-recorded-code imports and calls these" in err
    assert main(["replay", str(made), "--step", "4", "--run-recorded-code", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["losses"] == [[-78.75]]
    first, model, data = err.splitlines()[:3]
    assert first.startswith("importing and calling what ")
    assert HERE in model
    assert DATA in data


def test_all_that_runs_by_request_is_printed_in_plain_sight(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A strategy and options of compilers too; no name forges a line, and no text pushes the others out of sight."""
    for name, value in (("strategy", "no_such_strategy"), ("compile", {"backend": "no_such_backend"})):
        run = made.with_name(f"{made.name}-{name}")
        shutil.copytree(made, run)
        hostile(run, lambda config, n=name, v=value: config.update({n: {"value": v, "origin": "code"}}))  # type: ignore[misc]
        assert main(["replay", str(run), "--step", "4", "--run-recorded-code"]) != 0
        assert re.search(rf"^  {name}: .*no_such_", capfd.readouterr().err, re.MULTILINE)
    path = "no_such_module:Net\x1b[2J\nimporting nothing"
    section = {"class_path": path, "init_args": {"a": "a" * 1_000_000, "b": {"class_path": "subprocess.getoutput"}}}
    hostile(made, lambda config: config["model"].update(value=section))
    for more in ([], ["--run-recorded-code"]):
        assert main(["replay", str(made), "--step", "4", *more]) == 2
        err = capfd.readouterr().err
        assert not [line for line in err.splitlines() if line.startswith("importing nothing")]
        assert err.replace("\n", "").isprintable()
        assert len(err) < 5000
        assert "subprocess.getoutput" in err or not more


def test_a_setting_that_may_run_code_must_be_given(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = {"value": {"backend": "eager"}, "origin": "code"}
    hostile(made, lambda config: config.update(compile=options))
    assert main(["replay", str(made), "--step", "4", *GIVEN]) == 2
    assert "--set 'compile={backend: eager}'" in capfd.readouterr().err
    assert main(["replay", str(made), "--step", "4", *GIVEN, "--set", "compile={backend: eager}"]) == 0
