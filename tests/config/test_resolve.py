"""Order of origins, reading of the environment and of the file, and their errors."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from engine import Fit
from engine.compat import names as other_trainers_names
from engine.config.duration import Duration
from engine.config.resolve import UNSET, Resolved, resolve
from engine.config.settings import Settings


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def values(resolved: Resolved, *names: str) -> list[tuple[Any, str]]:
    return [(getattr(resolved.settings, name), resolved.origins[name]) for name in names]


def test_code_before_environment_before_file_before_default(in_tmp: Path) -> None:
    (in_tmp / "fit.yaml").write_text("# mine\nmax_steps: 1\nseed: 1\nlog_every_n_steps: 1\n")
    found = resolve({"max_steps": 3, "seed": UNSET}, {"FIT_MAX_STEPS": "2", "FIT_SEED": "2", "HOME": "/"})
    assert values(found, "max_steps", "seed", "log_every_n_steps", "devices") == [
        (3, "code"),
        (2, "environment FIT_SEED"),
        (1, "file fit.yaml:4"),
        ("auto", "default"),
    ]


def test_none_in_code_is_a_value(in_tmp: Path) -> None:
    assert values(resolve({"val_every": None}, {"FIT_VAL_EVERY": "5"}), "val_every") == [(None, "code")]


def test_the_named_file_replaces_the_default_one(in_tmp: Path) -> None:
    (in_tmp / "fit.yaml").write_text("seed: 1\n")
    (in_tmp / "other.yaml").write_text("max_steps: 2\n")
    for found in (
        resolve({}, {"FIT_CONFIG": "other.yaml"}),
        resolve({}, {"FIT_CONFIG": "none.yaml"}, Path("other.yaml")),
    ):
        assert values(found, "seed", "max_steps") == [(None, "default"), (2, "file other.yaml:1")]


@pytest.mark.parametrize("empty", ["", "# nothing\n"])
def test_an_empty_file_says_nothing(in_tmp: Path, empty: str) -> None:
    (in_tmp / "fit.yaml").write_text(empty)
    assert set(resolve({}, {}).origins.values()) == {"default"}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("precision", "no", "32-true"),  # YAML 1.1 makes a bool of it
        ("precision", "16", "16-mixed"),
        ("gradient_clip_val", "1e-3", 1e-3),  # YAML 1.1 makes text of it
        ("gradient_clip_val", "null", None),
        ("max_time", "10:00:00:00", Duration("seconds", 864000)),  # YAML 1.1 makes 36000000 of it
        ("max_time", "1.5 h", Duration("seconds", 5400)),
        ("val_every", "500", Duration("steps", 500)),
        ("val_every", "0.5", Duration("epochs", 0.5)),
        ("val_every", "null", None),
        ("devices", "2", 2),
        ("devices", "0,1", (0, 1)),
        ("devices", "[0, 1]", (0, 1)),
        ("accumulate_grad_batches", "{0: 1, 4: 2}", {0: 1, 4: 2}),
        ("limit_val_batches", "1.0", 1.0),
        ("limit_val_batches", "1", 1),
        ("compile", "yes", True),
        ("compile", "1", True),
        ("deterministic", "warn", "warn"),
        ("deterministic", "0", False),
        ("matmul_precision", "medium", "medium"),
        ("fast_dev_run", "1", 1),
        ("on_nonfinite", "skip", "skip"),
        ("root_dir", "2024", Path("2024")),
        ("strategy", "ddp", "ddp"),
    ],
)
def test_text_is_read_by_the_type_of_the_setting(in_tmp: Path, name: str, text: str, value: Any) -> None:
    (in_tmp / "file.yaml").write_text(f"{name}: {text}\n")
    for environ in ({f"FIT_{name.upper()}": text}, {"FIT_CONFIG": "file.yaml"}):
        found = getattr(resolve({}, environ).settings, name)
        assert found == value
        assert type(found) is type(value)


def test_names_are_checked_everywhere(in_tmp: Path) -> None:
    with pytest.raises(TypeError, match="'precison' is not an argument of Fit; did you mean 'precision'"):
        resolve({"precison": 1}, {})
    with pytest.raises(ValueError, match=r"environment FIT_PRECISON.*did you mean 'precision'"):
        resolve({}, {"FIT_PRECISON": "1"})
    with pytest.raises(ValueError, match=r"environment FIT_seed.*did you mean FIT_SEED"):
        resolve({}, {"FIT_seed": "1"})
    (in_tmp / "fit.yaml").write_text("seed: 1\nprecison: no\n")
    with pytest.raises(ValueError, match=r"file fit.yaml:2.*did you mean 'precision'"):
        resolve({}, {})


def test_variables_of_the_launcher_are_no_settings(in_tmp: Path) -> None:
    assert resolve({}, {"FIT_PARENT_PID": "1"}).settings.max_epochs == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: -1", r"file fit.yaml:1: seed=-1 is not possible"),
        ("\n\nmax_epochs: [1]", r"file fit.yaml:3: max_epochs=\[1\] is of type list"),
        ("- seed", "has a sequence"),
        ("seed: 1\nseed: 2", "fit.yaml:2: 'seed' was given already in file fit.yaml:1"),
        ("a: b: c", "not valid YAML"),
        ("callbacks: []", "in code only"),
        (
            "seed: !!python/object/apply:os.system ['touch pwned']",
            r"fit.yaml:1: the tag '!!python/object/apply:os.system' is refused",
        ),
    ],
)
def test_errors_name_the_line(in_tmp: Path, text: str, message: str) -> None:
    (in_tmp / "fit.yaml").write_text(text)
    with pytest.raises((ValueError, TypeError), match=message):
        resolve({}, {})
    assert not (in_tmp / "pwned").exists()


def test_errors_name_the_variable(in_tmp: Path) -> None:
    with pytest.raises(ValueError, match=r"environment FIT_PRECISION: precision='fp7'"):
        resolve({}, {"FIT_PRECISION": "fp7"})
    with pytest.raises(ValueError, match=r"FIT_SEED: seed is empty"):
        resolve({}, {"FIT_SEED": ""})
    with pytest.raises(ValueError, match=r"FIT_CALLBACKS: callbacks"):
        resolve({}, {"FIT_CALLBACKS": "[]"})


def test_a_wrong_value_that_is_overridden_is_still_an_error(in_tmp: Path) -> None:
    with pytest.raises(ValueError, match="FIT_SEED"):
        resolve({"seed": 1}, {"FIT_SEED": "-1"})


def test_a_missing_file_is_an_error_only_when_it_is_named(in_tmp: Path) -> None:
    assert resolve({}, {}).settings.max_epochs == 1
    with pytest.raises(FileNotFoundError, match=r"FIT_CONFIG names 'no\.yaml'"):
        resolve({}, {"FIT_CONFIG": "no.yaml"})
    with pytest.raises(FileNotFoundError, match=r"no\.yaml"):
        resolve({}, {}, Path("no.yaml"))


def test_what_fast_dev_run_replaces_says_so(in_tmp: Path) -> None:
    found = resolve({"fast_dev_run": True, "max_epochs": 5}, {})
    assert values(found, "fast_dev_run", "max_epochs") == [(True, "code"), (1, "fast_dev_run")]


def test_unset_is_one_object() -> None:
    assert repr(UNSET) == "<default>"
    assert copy.deepcopy(UNSET) is UNSET
    assert pickle.loads(pickle.dumps(UNSET)) is UNSET


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_epoch", "did you mean 'max_epochs'?"),
        ("gpus", "here it is called 'devices'"),
        ("gradient_accumulation_steps", "here it is called 'accumulate_grad_batches'"),
        ("logger", "loggers are callbacks"),
        ("ckpt_path", "resuming is an argument of run"),
        ("check_val_every_n_epoch", "here it is val_every='1 epochs' (a plain number counts optimizer steps)"),
        ("profiler", "profilers are callbacks"),
        ("overfit_batch", "did you mean 'overfit_batches'?"),
        ("limit_tests_batches", "did you mean 'limit_test_batches'?"),
    ],
)
def test_names_of_other_trainers(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        Fit(**{name: 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape(said)):
        resolve({}, {f"FIT_{name.upper()}": "1"})
    with pytest.raises(ValueError, match=re.escape(said)):
        resolve({}, {}, overrides=[f"{name}=1"])
    file = tmp_path / "fit.yaml"
    file.write_text(f"{name}: 1\n")
    with pytest.raises(ValueError, match=re.escape(said)):
        resolve({}, {}, file)


def test_every_name_that_is_told_is_a_setting() -> None:
    assert set(other_trainers_names.NAMES.values()) <= {field.name for field in fields(Settings)}
    assert not (set(other_trainers_names.NAMES) | set(other_trainers_names.OTHERWISE)) & {
        field.name for field in fields(Settings)
    }


def test_help_shows_the_value_of_every_default(in_tmp: Path) -> None:
    shown = inspect.signature(Fit).parameters
    assert [name for name, each in shown.items() if each.kind is not each.KEYWORD_ONLY] == []
    assert list(shown) == [field.name for field in fields(Settings)]
    text = pydoc.render_doc(Fit, renderer=pydoc.plaintext)
    assert "<default>" not in text
    for said in (
        "max_epochs: 'int | None' = None",
        "val_every: 'int | float | str | timedelta | Duration | None' = '1 epochs'",
        "= 'runs'",
    ):
        assert said in text
    for name, each in shown.items():  # what is shown is what holds
        assert Fit(**{name: each.default}).settings == Fit().settings
