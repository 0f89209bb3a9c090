"""Settings: defaults, normal forms, and an error for each wrong value."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from engine.config.duration import Duration
from engine.config.settings import KINDS, Settings, checked_setting


def test_a_run_without_any_limit_is_one_epoch() -> None:
    assert Settings().max_epochs == 1
    assert Settings(max_steps=5).max_epochs is None
    assert Settings(max_time="1 s").max_epochs is None
    assert Settings(max_epochs=0).max_epochs == 0


@pytest.mark.parametrize(
    ("name", "given", "normal"),
    [
        ("precision", "no", "32-true"),
        ("precision", "bf16", "bf16-mixed"),
        ("precision", "fp16", "16-mixed"),
        ("precision", 64, "64-true"),
        ("accelerator", "GPU", "gpu"),
        ("devices", "2", 2),
        ("devices", "0,3", (0, 3)),
        ("devices", [1], (1,)),
        ("max_time", "10 min", Duration("seconds", 600)),
        ("max_time", timedelta(hours=1), Duration("seconds", 3600)),
        ("val_every", 5, Duration("steps", 5)),
        ("val_every", None, None),
        ("accumulate_grad_batches", {4: 2, 0: 1}, {0: 1, 4: 2}),
        ("gradient_clip_val", 1, 1.0),
        ("gradient_clip_val", 0, None),
        ("limit_val_batches", 0.0, 0),
        ("limit_val_batches", 1.0, 1.0),
        ("limit_val_batches", 1, 1),
        ("callbacks", None, ()),
        ("root_dir", "here", Path("here")),
        ("num_sanity_val_steps", -1, -1),
    ],
)
def test_normal_forms(name: str, given: Any, normal: Any) -> None:
    found = getattr(Settings(**{name: given}), name)
    assert found == normal
    assert type(found) is type(normal) or isinstance(found, Path)
    assert checked_setting(name, found) == found  # dataclasses.replace(settings, ...) gives it again


@pytest.mark.parametrize("name", KINDS)
def test_defaults_are_in_normal_form(name: str) -> None:
    default = next(field.default for field in fields(Settings) if field.name == name)
    assert (checked_setting(name, default), type(checked_setting(name, default))) == (default, type(default))


def test_a_single_callback_is_a_list_of_one() -> None:
    callback = object()
    assert Settings(callbacks=callback).callbacks == (callback,)


@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("precision", "fp7", ValueError, "did you mean 'fp8'"),
        ("accelerator", "cdua", ValueError, "did you mean 'cuda'"),
        ("accelerator", None, TypeError, "NoneType"),
        ("matmul_precision", "hihg", ValueError, "did you mean 'high'"),
        ("matmul_precision", True, TypeError, "or None for what torch is set to"),
        ("strategy", 3, TypeError, "strategy"),
        ("strategy", "", TypeError, "name of a strategy"),
        ("devices", 0, ValueError, "at least 1"),
        ("devices", "two", ValueError, "distinct device indices"),
        ("devices", [0, 0], ValueError, "distinct"),
        ("devices", True, TypeError, "bool"),
        ("num_nodes", 0, ValueError, "at least 1"),
        ("max_epochs", -1, ValueError, "None for no limit of epochs"),
        ("max_steps", True, TypeError, "bool"),
        ("max_steps", 1e3, TypeError, "float"),
        ("max_time", 600, ValueError, "600 steps"),
        ("max_time", "10 mim", ValueError, "did you mean 'min'"),
        ("val_every", "0 steps", ValueError, "more than 0"),
        ("accumulate_grad_batches", 0, ValueError, "at least 1"),
        ("accumulate_grad_batches", {}, ValueError, "schedule"),
        ("accumulate_grad_batches", {0: 0}, ValueError, "schedule"),
        ("accumulate_grad_batches", {-1: 2}, ValueError, "schedule"),
        ("accumulate_grad_batches", "4", TypeError, "str"),
        ("global_batch_size", 0, ValueError, "at least 1"),
        ("gradient_clip_val", -0.1, ValueError, "at least 0"),
        ("gradient_clip_val", float("nan"), ValueError, "at least 0"),
        ("gradient_clip_val", "1", TypeError, "str"),
        ("gradient_clip_algorithm", "nrom", ValueError, "did you mean 'norm'"),
        ("num_sanity_val_steps", -2, ValueError, "at least -1"),
        ("limit_train_batches", 1.5, ValueError, "fraction"),
        ("limit_train_batches", -1, ValueError, "fraction"),
        ("limit_val_batches", True, TypeError, "bool"),
        ("fast_dev_run", -1, ValueError, "at least 0"),
        ("log_every_n_steps", -1, ValueError, "at least 0"),
        ("callbacks", "csv", TypeError, "Callback objects"),
        ("callbacks", [dict], TypeError, "class dict"),
        ("compile", "yes", ValueError, "True or False"),
        ("activation_offload", "block", ValueError, "did you mean 'blocks'"),
        ("activation_offload", 0, ValueError, "an int n of at least 1"),
        ("activation_offload", 1.5, TypeError, "the first n blocks"),
        ("sync_batchnorm", "yes", ValueError, "True or False"),
        ("deterministic", "wran", ValueError, "did you mean 'warn'"),
        ("seed", 2**32, ValueError, "4294967295"),
        ("seed", "1", TypeError, "str"),
        ("on_nonfinite", "rise", ValueError, "did you mean 'raise'"),
        ("root_dir", 3, TypeError, "path"),
        ("root_dir", "", ValueError, "path"),
        ("root_dir", "runs/a\nepoch 9: loss=0", ValueError, "line ends"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_possible(
    name: str, given: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        Settings(**{name: given})
    assert name in str(caught.value)


def test_the_check_of_one_setting() -> None:
    assert checked_setting("seed", 3) == 3
    with pytest.raises(ValueError, match="did you mean 'seed'"):
        checked_setting("sed", 3)


def test_a_global_batch_and_a_window_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        Settings(global_batch_size=64, accumulate_grad_batches=2)


def test_accumulation_schedule() -> None:
    settings = Settings(accumulate_grad_batches={2: 4, 5: 8})
    assert [settings.accumulate_at(epoch) for epoch in (0, 1, 2, 4, 5, 9)] == [1, 1, 4, 4, 8, 8]
    assert Settings(accumulate_grad_batches=3).accumulate_at(7) == 3


def test_fast_dev_run_replaces_the_limits() -> None:
    settings = Settings(fast_dev_run=3, max_steps=100, max_epochs=7, limit_val_batches=0.5)
    assert (settings.max_epochs, settings.max_steps, settings.num_sanity_val_steps) == (1, None, 0)
    assert (settings.limit_train_batches, settings.limit_val_batches) == (3, 3)
    assert Settings(fast_dev_run=True).limit_train_batches == 1
    assert Settings(fast_dev_run=False).limit_train_batches is None
