"""What a class has is asked of the class."""

from __future__ import annotations

import inspect

import pytest

import engine
from engine.compat.migrate.signatures import member, rejected, signature


def test_members_of_our_classes() -> None:
    log = member(engine.TrainModule, "log")
    assert log is not None
    assert log.call is not None
    assert "sync_dist" in log.call.parameters
    assert "self" not in log.call.parameters
    device = member(engine.TrainModule, "device")
    assert device is not None
    assert not device.settable
    assert member(engine.TrainModule, "automatic_optimization") is not None
    assert member(engine.TrainModule, "logger") is not None  # only annotated: __getattr__ gives it
    assert member(engine.Run, "module") is not None  # set by __init__
    loaded = member(engine.TrainModule, "load_from_checkpoint")
    assert loaded is not None
    assert loaded.call is not None
    assert "cls" not in loaded.call.parameters


@pytest.mark.parametrize(
    ("owner", "name"), [(engine.Run, "global_step"), (engine.Fit, "fit"), (engine.TrainModule, "on_epoch_end")]
)
def test_an_attribute_that_only_raises_is_none(owner: type, name: str) -> None:
    assert member(owner, name) is None


def test_refused_arguments_are_not_parameters() -> None:
    found = signature(engine.Fit)
    assert found is not None
    assert "unknown" not in found.parameters
    assert rejected(found, 0, ["max_epochs", "gpus"]) == (["gpus"], False)


def test_what_a_call_may_give() -> None:
    def function(a: int, b: int = 0, *, c: int = 0) -> None: ...

    def open_one(*args: int, **kwargs: int) -> None: ...

    assert rejected(inspect.signature(function), 2, ["c", "d"]) == (["d"], False)
    assert rejected(inspect.signature(function), 3, []) == ([], True)
    assert rejected(inspect.signature(open_one), 9, ["x"]) == ([], False)
