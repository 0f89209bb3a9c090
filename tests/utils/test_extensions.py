"""What the core asks annexes, and what it does without them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from support.toys import Weight, fit, ones

import engine
from engine import Callback, strategies
from engine.utils import extensions


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Registers entry points of this distribution instead of its own: ``group``, then name and value of one."""

    def clear() -> None:
        extensions._extensions.cache_clear()
        extensions.answer.cache_clear()

    class Installed:
        entry_points: list[EntryPoint] = []

    def register(*points: tuple[str, str, str]) -> None:
        Installed.entry_points = [EntryPoint(name, value, group) for group, name, value in points]
        monkeypatch.setattr(extensions, "distribution", lambda name: Installed)
        clear()

    yield register
    monkeypatch.undo()
    clear()


def test_without_annexes_every_question_has_an_answer(registered: Callable[..., None]) -> None:
    registered()
    assert extensions.hint("setting", "max_epoch", ["max_epochs"]) == "; did you mean 'max_epochs'?"
    assert extensions.hint("setting", "gpus", ["max_epochs"]) == ""
    assert str(extensions.missing(Weight(), "TrainModule", "fabric")) == "'Weight' object has no attribute 'fabric'"
    assert extensions.completed(Weight) is Weight
    extensions.checked(Weight(), Callback())
    with pytest.raises(AttributeError, match=r"^run.trainer: nothing in this installation provides it$"):
        extensions.attribute(object(), "trainer")


def test_an_annex_that_is_not_in_this_copy_is_left_out(registered: Callable[..., None]) -> None:
    registered(
        ("engine.hints", "gone", "engine.not_there.hints:find"),
        ("engine.attributes", "trainer", "engine.not_there:TrainerView"),
    )
    assert extensions.hint("setting", "gpus") == ""
    with pytest.raises(AttributeError, match="nothing in this installation"):
        extensions.attribute(object(), "trainer")


def test_an_annex_that_lacks_a_package_says_so(
    registered: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_annex.py").write_text("import a_package_that_is_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    registered(("engine.hints", "broken", "broken_annex:find"))
    with pytest.raises(ImportError, match=r"'broken = broken_annex:find'.*a_package_that_is_not_installed"):
        extensions.hint("setting", "gpus")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("adapters_not_there:adapt", "ModuleNotFoundError: No module named 'adapters_not_there'"),
        ("third_adapters:nothing", "AttributeError: module 'third_adapters' has no attribute 'nothing'"),
        ("third_adapters:number", "TypeError: it is of type int, not a function or a class"),
        ("third_raises:adapt", "RuntimeError: boom"),
        ("third_ends:adapt", "SystemExit: 3"),
        ("third_adapters:a b", "AttributeError: "),
    ],
)
def test_a_broken_entry_point_names_its_package(
    value: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "third_party-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[engine.adapters]\nthird_library = {value}\n[engine.strategies]\nthird = {value}\n"
    )
    (tmp_path / "third_adapters.py").write_text("number = 3\n")
    (tmp_path / "third_raises.py").write_text("raise RuntimeError('boom')\n")
    (tmp_path / "third_ends.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    foreign = type("Foreign", (), {"__module__": "third_library.models"})()
    for group, name, ask in (
        ("adapters", "third_library", lambda: extensions.adapted(foreign)),
        ("strategies", "third", lambda: strategies.get("third")),
    ):
        with pytest.raises(ImportError) as caught:
            ask()
        assert str(caught.value).startswith(
            f"the installed package 'third-party' registers the entry point '{name} = {value}' in the group 'engine.{group}'"
        )
        assert reason in str(caught.value)
        assert str(caught.value).endswith("update or uninstall 'third-party'")


def test_a_copy_that_is_not_installed_has_no_annexes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "DISTRIBUTION", "a-distribution-that-nobody-has")
    extensions._extensions.cache_clear()
    try:
        assert extensions._extensions(extensions.HINTS) == ()
    finally:
        extensions._extensions.cache_clear()


def frames(error: BaseException) -> list[tuple[str, str]]:
    """Folder and function of each frame in the traceback of ``error``."""
    package = Path(engine.__file__).parent
    return [
        (
            Path(frame.filename).relative_to(package).parts[0] if package in Path(frame.filename).parents else "",
            frame.name,
        )
        for frame in traceback.extract_tb(error.__traceback__)
    ]


def test_the_frame_of_an_annex_is_in_nobodys_traceback(tmp_path: Path) -> None:
    class Fails(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise OSError("mine")

    trainer = fit(tmp_path)
    with pytest.raises(OSError, match="mine") as caught:
        trainer.run(Fails(), ones(1))
    assert frames(caught.value)[1] == ("fit.py", "run")
    with pytest.raises(TypeError, match="here it is called 'module'") as refused:
        trainer.run(model=None)  # type: ignore[call-arg]
    assert [name for _, name in frames(refused.value)] == ["test_the_frame_of_an_annex_is_in_nobodys_traceback"]
