"""Callbacks: who is called, in which order, and how their state travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.toys import Weight, fit, ones

from engine import Callback, TrainModule


class Named(Callback):
    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def on_train_start(self, run: Any, module: Any) -> None:
        self.seen.append(self.name)

    def on_train_epoch_end(self, run: Any, module: Any) -> None:
        self.seen.append(f"{self.name} epoch end")


class Last(Named):
    runs_last = True


class Module(Weight):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def on_train_start(self) -> None:
        self.seen.append("module")

    def on_train_epoch_end(self) -> None:
        self.seen.append("module epoch end")


def test_callbacks_in_their_order_then_the_module_then_those_that_run_last(tmp_path: Path) -> None:
    seen: list[str] = []
    fit(tmp_path, callbacks=[Last("last", seen), Named("a", seen), Named("b", seen)]).run(Module(seen), ones(1))
    assert seen == ["a", "b", "module", "last", "a epoch end", "b epoch end", "module epoch end", "last epoch end"]


def test_every_hook_of_the_module_is_an_event_of_callbacks() -> None:
    acting = {
        name for name in dir(TrainModule) if "_batch_transfer" in name or "_model_" in name
    }  # they do something, or return it
    of_module = {name for name in dir(TrainModule) if name.startswith("on_")} - acting - {"on_gpu"}  # a property
    only_callbacks = {
        "on_sanity_check_start",
        "on_sanity_check_end",
        "on_before_log",
        "on_log",
        "on_media",
        "on_exception",
    }
    assert of_module == {name for name in vars(Callback) if name.startswith("on_")} - only_callbacks


def test_entries_of_checkpoint_hooks_come_back(tmp_path: Path) -> None:
    found: list[Any] = []

    class Adds(Callback):
        def on_save_checkpoint(self, run: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = [1, {"a": 2.5}]

        def on_load_checkpoint(self, run: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            found.append(dict(checkpoint))

        def on_train_end(self, run: Any, module: Any) -> None:
            run.save_checkpoint()

    class Keeps(Weight):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["module"] = "x"

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            found.append(checkpoint["module"])

    fit(tmp_path, callbacks=Adds()).run(Keeps(), ones(1))
    assert found == []
    fit(tmp_path, callbacks=Adds()).run(Keeps(), ones(1), resume="last")
    assert found == ["x", {"mine": [1, {"a": 2.5}], "module": "x"}]


def test_an_object_that_is_no_callback_is_refused(tmp_path: Path) -> None:
    class Other:
        pass

    with pytest.raises(TypeError, match=r"callbacks has .*Other.* give engine.Callback objects"):
        fit(tmp_path, callbacks=[Other()]).run(Weight(), ones(1))


def test_a_class_in_the_place_of_a_callback_is_refused(tmp_path: Path) -> None:
    module = Weight()
    module.configure_callbacks = lambda: [Last]  # type: ignore[method-assign, list-item, return-value]
    with pytest.raises(TypeError, match=r"Weight.configure_callbacks has the class Last: give an object, Last\(...\)"):
        fit(tmp_path).run(module, ones(1))
