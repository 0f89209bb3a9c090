"""The table of who is called at each event."""

from __future__ import annotations

from typing import Any

import pytest
from support.internals import new_hooks
from support.toys import Weight

from engine import Callback, TrainModule
from engine.loop.hooks import Hooks


class Counts(Callback):
    def on_train_batch_end(self, *args: Any) -> None: ...


def table(*callbacks: Callback, module: TrainModule | None = None) -> Hooks:
    return new_hooks(callbacks, module or Weight())


def test_only_overridden_hooks_are_in_the_table() -> None:
    hooks = table(Callback(), Counts())
    assert {event for event, called in vars(hooks).items() if called and not event.startswith("_")} == {
        "on_train_batch_end"
    }
    assert len(hooks.on_train_batch_end) == 1
    with pytest.raises(AttributeError, match="there is no event 'on_batch_done'"):
        _ = hooks.on_batch_done


def test_a_hook_may_be_set_on_the_object() -> None:
    callback = Callback()
    callback.on_train_start = lambda run, module: None  # type: ignore[method-assign]
    assert len(table(callback).on_train_start) == 1


def test_a_hook_of_the_module_takes_neither_run_nor_module() -> None:
    class Module(Weight):
        def on_before_backward(self, loss: Any) -> Any:
            return loss + 1

    (hook,) = table(module=Module()).on_before_backward
    assert hook("run", "module", 4) == 5


def test_a_wrapper_gets_each_hook_with_its_name() -> None:
    class Module(Weight):
        def on_train_start(self) -> None:
            seen.append("its own")

    class Late(Callback):
        runs_last = True

        def on_validation_end(self, *args: Any) -> None: ...

    seen: list[str] = []
    hooks = table(Counts(), Late(), module=Module())

    def wrapper(name: str, hook: Any) -> Any:
        return lambda *args: (seen.append(name), hook(*args))

    hooks.wrap(wrapper)
    for hook in (*hooks.on_train_batch_end, *hooks.on_train_start, *hooks.last_on_validation_end):
        hook("run", "module")
    assert [name.rpartition(".")[2] for name in seen] == [
        *("on_train_batch_end", "on_train_start", "its own", "on_validation_end"),
    ]
    assert seen[0] == "[Callback]Counts.on_train_batch_end"
    assert seen[1] == "[TrainModule]Module.on_train_start"


def test_late_hooks_take_the_places_of_their_owners() -> None:
    class Named(Callback):
        """All have one name, so that only the order of the callbacks tells them apart."""

        def __init__(self, name: str) -> None:
            self.name = name

    class Saves(Named):
        runs_last = True

    def hook_of(name: str) -> Any:
        return lambda *args: called.append(name)

    def order() -> list[str]:
        called.clear()
        for hook in hooks.on_train_start:
            hook("run", "module")
        return list(called)

    called: list[str] = []
    first, second, last, module = Named("first"), Named("second"), Saves("last"), Weight()
    owners: list[Any] = [first, second, last]
    second.on_train_start = hook_of("second")  # type: ignore[method-assign]
    hooks = table(*owners, module=module)
    hooks.add("on_train_start", "added", hook_of("added"))
    hooks.wrap(lambda name, hook: lambda *args: (called.append("wrapped"), hook(*args)))
    for owner, name in ((last, "last"), (module, "module"), (first, "first")):
        owner.on_train_start = hook_of(name)
    hooks.take_late(owners, module)
    expected = ["first", "second", "module", "last", "added"]
    assert order() == [text for name in expected for text in ("wrapped", name)]
    second.on_train_start = None  # type: ignore[method-assign,assignment]
    del last.on_train_start
    hooks.take_late(owners, module)
    assert order()[1::2] == ["first", "module", "added"]
