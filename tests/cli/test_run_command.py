"""``fit run``: what is built from the command line and the file, and what it is trained to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from engine import TrainModule
from engine.checkpoint.catalog import facts
from engine.cli.object_builder import ObjectBuilder
from engine.cli.requested_objects import Component
from engine.cli.terminal import UsageError

SET = (
    "--set",
    "max_epochs=3",
    "num_sanity_val_steps=0",
    "model.start=0.5",
    "model.options.lr=0.25",
    "data.batch_size=4",
)
# Each epoch has the batches [0, 1, 2, 3] and [4, 5, 6, 7], whose means are 1.5 and 5.5.
WEIGHT = 0.5 - 0.25 * 3 * (1.5 + 5.5)


def load(path: Path | str = "runs", **overrides: object) -> TrainModule:
    from net import Net  # type: ignore[import-not-found]

    found: TrainModule = Net.load_from_checkpoint(path, **overrides)
    return found


@pytest.mark.parametrize("target", ["net:Net", "net.py:Net", "net.py", "net.Net", "net"])
def test_the_target_is_a_module_or_a_file(fit, target: str) -> None:
    ended = fit("run", target, "--data", "net:Numbers", "--callback", "ModelCheckpoint", *SET)
    assert (ended.status, ended.out.splitlines()[0]) == (0, "completed (max_epochs=3 reached): 3 epochs, 6 steps"), (
        ended.err
    )
    assert load().w.item() == WEIGHT


def test_constructor_arguments_are_the_hyperparameters(fit, here: Path) -> None:
    ended = fit(
        "run", "net:Net", "--data", "net:numbers", "--callback", "ModelCheckpoint", *SET, "model.kind=FANCY", "seed=3"
    )
    assert ended.status == 0, ended.err
    saved = facts("runs")["hparams"]
    assert (saved["start"], saved["fail"], saved["nap"]) == (0.5, "", 0.0)


def test_data_may_be_a_function_that_gives_a_loader(fit) -> None:
    ended = fit("run", "net:Net", "--data", "net.py:numbers", "--callback", "ModelCheckpoint", *SET, "data.count=4")
    assert ended.status == 0, ended.err
    assert load().w.item() == 0.5 - 0.25 * 3 * 1.5


FILE = """\
max_epochs: 2
num_sanity_val_steps: 0
model:
  class_path: net:Net
  init_args:
    start: 1.0
    options: {lr: 0.5}
    optimizer: torch.optim.AdamW
data:
  class_path: net.Numbers
  init_args:
    batch_size: 8
    several: false
callbacks:
  - ModelCheckpoint
  - class_path: net:Tell
    init_args: {path: told, text: from the file}
"""


def test_a_file_describes_all(fit, here: Path) -> None:
    (here / "fit.yaml").write_text(FILE)
    assert fit("run", "--set", "model.optimizer=torch.optim.SGD", "callbacks.1.text=from the command line").status == 0
    assert load().w.item() == 1.0 - 0.5 * 2 * 3.5
    assert (here / "told").read_text() == "from the command line"


def test_the_command_line_stands_above_the_file(fit, here: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here / "other.yaml").write_text(FILE)
    changed = ("--callback", "net:Tell", "--set", "callbacks.2.path=second", "max_epochs=1")
    ended = fit("run", "net.py", "--config", "other.yaml", "--data", "net:numbers", *changed)
    assert ended.status == 0, ended.err
    # The model's parameters stay, because it is the same class; those of the other data do not hold for a function.
    assert "the parameters of net.Numbers are not used, because net:numbers was given" in caplog.text
    assert (here / "told").read_text() == "from the file"
    assert (here / "second").read_text() == "a step"
    assert facts("runs")["hparams"]["start"] == 1.0


def test_a_callback_of_file_and_command_line_is_given_twice(fit, here: Path) -> None:
    (here / "fit.yaml").write_text(FILE)
    ended = fit("run", "--callback", "ModelCheckpoint")
    said = "ModelCheckpoint is given twice, in fit.yaml:15 and by --callback: leave one of them out; --set callbacks.0.PARAMETER=VALUE"
    assert (ended.status, said in ended.err) == (2, True), ended.err


def test_callbacks_are_named_by_number_or_class(fit, here: Path) -> None:
    base = ("run", "net:Net", "--data", "net:Numbers", "--callback", "net:Tell", "--callback", "ModelCheckpoint")
    assert fit(*base, "--set", "callbacks.Tell.path=a", "callbacks.1.dirpath=there").status == 0
    assert (here / "a").exists()
    assert [path.name for path in (here / "there").iterdir() if path.is_dir()] == ["step=00000002"]
    twice = fit(*base, "--callback", "net:Tell", "--set", "callbacks.Tell.path=a")
    assert (twice.status, "callbacks.0 or callbacks.2" in twice.err) == (2, True)


def test_the_printed_configuration_runs_the_same(fit, here: Path) -> None:
    base = (
        "run",
        "net:Net",
        "--data",
        "net:Numbers",
        "--callback",
        "ModelCheckpoint",
        "--callback",
        "net:Tell",
        "--set",
        "callbacks.1.path=told",
    )
    arguments = (
        *base,
        "max_epochs=3",
        "num_sanity_val_steps=0",
        "model.start=0.5",
        "model.options.lr=0.25",
        "val_every=10 min",
        "seed=7",
    )
    printed = fit(
        *arguments,
        "model.layer=torch.nn.Linear",
        "model.layer.in_features=2",
        "model.layer.out_features=3",
        "--print-config",
    ).out
    assert not (here / "runs").exists()
    assert "val_every: 600 seconds  # command line val_every=10 min\n" in printed
    assert "log_every_n_steps: 50  # default\n" in printed
    described = yaml.safe_load(printed)
    assert described["model"]["init_args"] == {
        "start": 0.5,
        "options": {"lr": 0.25, "names": []},
        "optimizer": "torch.optim.SGD",
        "kind": "PLAIN",
        "layer": {
            "class_path": "torch.nn.Linear",
            "init_args": {"in_features": 2, "out_features": 3, "bias": True, "device": None, "dtype": None},
        },
        "fail": "",
        "nap": 0.0,
        "extra": None,
    }
    (here / "printed.yaml").write_text(printed)
    again = fit("run", "--config", "printed.yaml", "--print-config").out
    assert yaml.safe_load(again) == described
    assert fit("run", "--config", "printed.yaml").status == 0
    assert load(layer=torch.nn.Linear(2, 3)).w.item() == WEIGHT


def test_what_was_built_is_in_the_checkpoint(fit, here: Path) -> None:
    arguments = ("run", "net:Net", "--data", "net:Numbers", "--callback", "ModelCheckpoint", "--callback", "CSVLogger")
    assert (
        fit(*arguments, "--set", "model.start=0.5", "model.extra=https://me:secret@host/", "max_epochs=2").status == 0
    )
    config = facts("runs")["config"]
    assert config["max_epochs"] == {"value": 2, "origin": "command line max_epochs=2"}
    assert config["model"]["value"]["class_path"] == "net:Net"
    assert config["model"]["value"]["init_args"]["start"] == 0.5
    assert config["model"]["value"]["init_args"]["extra"] == "https://***@host/"
    assert config["data"]["value"]["init_args"]["batch_size"] == 4
    assert [each["class_path"] for each in config["callbacks"]["value"]] == ["ModelCheckpoint", "CSVLogger"]
    # What the logger has written can be run again, with the secrets that it has left out.
    again = ("run", "--config", "runs/config.yaml", "--set", "root_dir=again")
    assert "config.yaml:" in (refused := fit(*again)).err
    assert "model.extra is https://***@host/, where *** was written in place of a secret: give the value" in refused.err
    assert fit(*again, "model.extra=https://me:secret@host/").status == 0
    assert facts("again")["hparams"]["start"] == 0.5


def test_a_default_without_a_text_is_named_and_taken_from_the_class(fit, here: Path) -> None:
    source = "\n".join(
        (
            "import torch, net",
            "class Odd(net.Net):",
            "    def __init__(self, table=torch.ones(2), scale: float = float('inf'), **kwargs):",
            "        super().__init__(**kwargs)",
        )
    )
    (here / "odd.py").write_text(source)
    printed = fit("run", "odd.py", "--print-config").out
    assert "# table: the default of Odd, an object without a text form\n" in printed
    assert yaml.safe_load(printed)["model"]["init_args"]["scale"] == float("inf")
    (here / "fit.yaml").write_text(printed)
    assert fit("run", "--data", "net:numbers").status == 0


def test_seeds_hold_for_the_first_weights(fit) -> None:
    drawn = []
    for seed in ("5", "5", "6"):
        assert (
            fit(
                "run", "net.py", "--data", "net:numbers", "--callback", "ModelCheckpoint", "--set", f"seed={seed}"
            ).status
            == 0
        )
        drawn.append(load().random.item())
    assert drawn[0] == drawn[1] != drawn[2]


def test_resume(fit) -> None:
    base = ("run", "net:Net", "--data", "net:Numbers", "--callback", "ModelCheckpoint", *SET)
    assert fit(*base, "max_epochs=1", "--resume", "auto").status == 0
    assert load().w.item() == 0.5 - 0.25 * 7
    ended = fit(*base, "--resume", "last")
    assert "6 steps" in ended.out
    assert load().w.item() == WEIGHT


def test_a_resume_with_the_configured_hyperparameters(fit, caplog: pytest.LogCaptureFixture) -> None:
    base = ("run", "net:Net", "--data", "net:Numbers", "--callback", "ModelCheckpoint", *SET)
    assert fit(*base, "max_epochs=1").status == 0
    resumed = (*base, "model.options.lr=0", "--resume", "last")
    assert fit(*resumed, "--set", "max_epochs=2").status == 0
    weight = load().w.item()
    assert weight < 0.5 - 0.25 * 7
    assert "the optimizer continues with the checkpoint's lr=0.25 (configured: 0)" in caplog.text
    assert "(fit run: --hyperparameters configured)" in caplog.text
    caplog.clear()
    assert fit(*resumed, "--hyperparameters", "configured").status == 0
    assert load().w.item() == weight
    assert "continues with the checkpoint's" not in caplog.text


HELP = """\
model: net:Net
  One weight, whose gradient is the mean of the batch.
    model.start          float                             default 0.0; the weight at the beginning.
    model.options.lr     float                             default 1.0; the learning rate.
"""


@pytest.mark.parametrize(
    "order", [("net:Net", "--data", "net:Numbers", "--help"), ("--help", "net:Net", "--data", "net:Numbers")]
)
def test_help_with_a_target_is_about_its_classes(fit, order: tuple[str, ...]) -> None:
    ended = fit("run", *order)
    assert ended.status == 0
    lines = [" ".join(line.split()) for line in ended.out.splitlines()]
    assert " ".join(HELP.split()) in " ".join(lines)
    assert "model.kind Kind {PLAIN, FANCY} default PLAIN" in lines
    assert "data: net:Numbers" in lines
    assert "data.several bool default False" in lines


def test_help_tells_nothing_of_a_base_class(fit, here: Path) -> None:
    (here / "bare.py").write_text(
        "from net import Net\n\nclass Bare(Net):\n    def training_step(self, batch, batch_idx): ...\n"
    )
    ended = fit("run", "bare:Bare", "--help")
    assert ended.out.splitlines()[2] == "model: bare:Bare"
    assert ended.out.splitlines()[3].startswith("    model.")


COMMANDS = {
    "os:system": {"command": "touch called"},
    "subprocess.getoutput": {"cmd": "touch called"},
    "subprocess:Popen": {"args": ["touch", "called"]},
}
PLACES: dict[str, Any] = {
    "callbacks": lambda command: {"callbacks": [command]},
    "data": lambda command: {"data": command},
    "model": lambda command: {"model": command},
    "model.layer": lambda command: {"model": {"class_path": "net:Net", "init_args": {"layer": command}}},
    "model.optimizer": lambda command: {"model": {"class_path": "net:Net", "init_args": {"optimizer": command}}},
    "model.extra": lambda command: {"model": {"class_path": "net:Net", "init_args": {"extra": command}}},
    "callbacks.0.path": lambda command: {"callbacks": [{"class_path": "net:Tell", "init_args": {"path": command}}]},
}


UNTYPED = ("model.extra", "subprocess:Popen")
"""A class is what a parameter that takes anything may be given."""


@pytest.mark.parametrize(
    ("place", "path"), [(place, path) for place in PLACES for path in COMMANDS if (place, path) != UNTYPED]
)
def test_what_a_file_names_is_checked_before_it_is_called(fit, here: Path, place: str, path: str) -> None:
    dotted = path.replace(":", ".")  # as jsonargparse writes paths
    command = {"class_path": dotted if "." in place else path, "init_args": COMMANDS[path]}
    config = {"model": "net:Net", "data": "net:numbers", "max_epochs": 1, **PLACES[place](command)}
    (here / "fit.yaml").write_text(yaml.safe_dump(config))
    ended = fit("run")
    assert ended.status == 2
    assert ended.err.startswith("fit: error: file fit.yaml:")
    assert not (here / "called").exists()


def test_functions_of_the_project_and_functions_that_say_what_they_return_are_called(fit, here: Path) -> None:
    (here / "made.py").write_text(
        "import net\nfrom engine import Callback\n"
        "def tell(path: str) -> Callback | None:\n    return net.Tell(path)\n"
        "def told(path: str):\n    return net.Tell(path)\n"
        "def words() -> str:\n    return 'a b'\n"
    )
    base = ("run", "net:Net", "--data", "net:numbers", "--set", "callbacks.0.path=told", "max_epochs=1", "--callback")
    assert fit(*base, "made:tell").status == 0
    text = "--callback: 'made:told' is a function that does not say what it returns, and it is not called to find out"
    assert text in fit(*base, "made:told").err
    refused = fit("run", "net:Net", "--data", "made:words")
    assert "--data: 'made:words' is a function that is annotated to return something else than" in refused.err


ERRORS = [
    (("nett:Net",), "there is no module 'nett'"),
    (("net:Nett",), "has no 'Nett'; did you mean 'Net'?"),
    (("neet.py",), "'neet.py', which does not exist"),
    (("neet.py",), "did you mean 'net.py'?"),
    (("net:numbers",), "'net:numbers' is a function, not a TrainModule"),
    (("net:Numbers",), "'net:Numbers' is the class Numbers, not a TrainModule"),
    ((), "no TrainModule is named"),
    (("net:Net", "--data", "net:Numberz"), "--data 'net:Numberz'"),
    (("net:Net", "--callback", "ModelChekpoint"), "did you mean 'ModelCheckpoint'?"),
    (
        ("net:Net", "--callback", "net:Options"),
        "--callback: 'net:Options' is the class Options, not an engine.Callback",
    ),
    (("net:Net", "--callback", "net:Tell"), "callbacks.0 Tell needs path: give --set callbacks.0.path=VALUE"),
    (
        ("net:Net", "--set", "model.strt=1"),
        "command line model.strt: model Net has no parameter 'strt'; did you mean 'start'?",
    ),
    (("net:Net", "--set", "model.options.rl=1"), "model.options has no parameter 'rl'; did you mean 'lr'?"),
    (
        ("net:Net", "--set", "model.start=big"),
        "command line model.start: model.start does not fit: start='big' is of type str: give float",
    ),
    (("net:Net", "--set", "model.kind=FNCY"), "did you mean 'FANCY'?; possible: PLAIN or FANCY"),
    (("net:Net", "--set", "model.optimizer=AdamW"), "AdamW is not a class with its module, such as torch.optim.AdamW"),
    (
        ("net:Net", "--set", "model.optimizer=torch.optim.Adm"),
        "model Net does not fit: module 'torch.optim' has no attribute 'Adm'",
    ),
    (
        ("net:Net", "--set", "model.layer=torch.nn.Linear", "model.layer.in_featurs=1"),
        "Option 'in_featurs' is not accepted (given: in_featurs=1)",
    ),
    (
        ("net:Net", "--set", "model.layer=torch.nn.Linear", "model.layer.in_features=-1", "model.layer.out_features=2"),
        "negative dimension -1",
    ),
    (("net:Net", "--set", "model.options=hostile.yaml"), "Unable to load config"),
    (("net:Net", "--set", "modl.start=1"), "there is no 'modl' to set; did you mean 'model'?"),
    (("net:Net", "--set", "max_epoch=1"), "did you mean 'max_epochs'?"),
    (("net:Net", "--set", "max_epochs=many"), "command line max_epochs=many"),
    (("net:Net", "--set", "data.count=1"), "there is no data"),
    (("net:Net", "--set", "callbacks.0.path=1"), "there is no callback '0'"),
    (("net:Net", "--set", "model=1"), "names no parameter"),
    (("--set", "max_epochs=1", "net:Net"), "the target comes before the options"),
    (("net:Net", "--config", "none.yaml"), "'none.yaml', which is not a file"),
    (("net:Net", "--config", "n" * 300), "n', which cannot be read (File name too long)"),
    (("net:Net",), "(fit run, fit plan: --data my.module:Data)"),
    (("net:Net", "--hyperparameters", "configured"), "--hyperparameters is for --resume"),
    (("--resume", "auto", "start=1"), "the target 'start=1': give a setting with --set"),
    (("net:Net", "--data", "net:numbers", "--set", "strategy=ddpp"), "did you mean 'ddp'?"),
    (("net:Net", "--data", "net:numbers", "--resume", "last"), "no complete checkpoint"),
    (
        ("net:Net", "--callback", "ModelCheckpoint", "--set", "callbacks.0.save_top_k=-5"),
        "ModelCheckpoint(save_top_k=-5)",
    ),
    (
        (
            "net:Net",
            "--set",
            "model.extra=!!python/object/apply:os.mkdir [pwned]",
            "model.start=!!python/object/apply:os.mkdir [pwned]",
        ),
        "model.start",
    ),
]


def test_a_parameter_without_type_and_default_must_be_given(fit, here: Path) -> None:
    (here / "bare.py").write_text(
        "from net import Net\nclass Bare(Net):\n    def __init__(self, width, *, depth=2):\n        super().__init__()\n"
    )
    ended = fit("run", "bare.py", "--data", "net:numbers")
    assert ended.status == 2
    assert "model Bare needs width: give --set model.width=VALUE" in ended.err
    assert fit("run", "bare.py", "--data", "net:numbers", "--set", "max_steps=1", "model.width=null").status == 0


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_what_is_wrong_is_said_in_one_line(fit, here: Path, arguments: tuple[str, ...], message: str) -> None:
    (here / "hostile.yaml").write_text("lr: !!python/object/apply:os.mkdir [pwned]\n")
    ended = fit("run", *arguments)
    assert ended.status == 2
    assert message in ended.err
    assert [line for line in ended.err.splitlines() if line.startswith("fit: error: ")] == ended.err.splitlines()
    assert not (here / "pwned").exists()


FILES = [
    ("model: {class_path: net:Net, init_args: {strt: 1}}", "file fit.yaml:1: model Net has no parameter 'strt'"),
    ("model:\n  class_path: net:Net\n  init_args:\n    start: big\n", "file fit.yaml:4: model.start does not fit"),
    (
        "model:\n  class_path: net:Net\n  init_args:\n    options:\n      rl: 1\n",
        "file fit.yaml:5: model.options has no parameter 'rl'",
    ),
    ("model:\n  class_path: net:Net\n  start: 1\n", "'start' besides class_path; parameters belong under init_args"),
    ("model:\n  class_pth: net:Net\n", "model has no class_path"),
    ("\nmodel: net:Nett\n", "file fit.yaml:2: model 'net:Nett'"),
    ("model: [net:Net]", "model is of type list"),
    (
        "model: net:Net\ncallbacks:\n  - ModelCheckpoint\n  - class_path: net:Tell\n    init_args: {pth: x}\n",
        "file fit.yaml:5: callbacks.1 Tell has no parameter 'pth'",
    ),
    ("model: net:Net\ncallbacks:\n", "file fit.yaml:2: callbacks.0 is empty: name a class, or remove the line"),
    (
        "model: net:Net\ncallbacks:\n  class_path: net:Tell\n  init_args: {pth: x}\n",
        "file fit.yaml:4: callbacks.0 Tell has no parameter 'pth'",
    ),
    ("model: net:Net\nmax_epoch: 3\n", "file fit.yaml:2: 'max_epoch'"),
    ("model: !!python/object/apply:os.mkdir [pwned]\n", "fit.yaml:1"),
]


@pytest.mark.parametrize(("text", "message"), FILES)
def test_what_is_wrong_in_a_file_is_said_with_its_line(fit, here: Path, text: str, message: str) -> None:
    (here / "fit.yaml").write_text(text)
    ended = fit("run")
    assert (ended.status, message in ended.err) == (2, True), ended.err
    assert not (here / "pwned").exists()


def test_a_file_with_several_modules_needs_a_name(fit, here: Path) -> None:
    (here / "two.py").write_text("from net import Net\nclass A(Net): pass\nclass B(Net): pass\n")
    (here / "none.py").write_text("from net import Net\n")
    assert "several classes that are a TrainModule (A, B); name one: two.py:A" in fit("run", "two.py").err
    assert "no class that is a TrainModule" in fit("run", "none.py").err


def test_names_of_the_file_must_not_hide_others(fit, here: Path) -> None:
    (here / "sub").mkdir()
    (here / "sub" / "json.py").write_text("")
    assert "the module 'json' is" in fit("run", "sub/json.py:Net").err


def test_a_parameter_is_known_by_its_type() -> None:
    def plain(width: int | None = 3, mode: str = "a") -> None: ...

    def path(place: Any = Path("x")) -> None: ...  # its text would be read as text

    assert ObjectBuilder(Component("data", "path", path)).as_values() == ({}, ["place"])
    assert ObjectBuilder(Component("data", "plain", plain, {"width": None})).as_values() == (
        {"width": None, "mode": "a"},
        [],
    )
    with pytest.raises(UsageError, match=r"data\.width does not fit"):
        ObjectBuilder(Component("data", "plain", plain, {}, overrides=[("width", "1.5")]))
