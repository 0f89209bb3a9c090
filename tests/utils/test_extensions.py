"""What the core asks annexes, and what it does without them."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from support.toys import Weight, fit, ones

import engine
from engine import Callback, strategies
from engine.utils import extensions

QUESTIONS = ("advice", "add_advice", "explain_call", "refuse_uncalled")
"""The fields of the annex's table that name one function."""


@pytest.fixture
def answer_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Writes a module in the place of the annex's table, from the source of its answers; an empty source: there is no annex."""

    def clear() -> None:
        extensions._answers.cache_clear()
        extensions.advice.cache_clear()

    def write(source: str) -> None:
        monkeypatch.setattr(extensions, "TABLE", "annex_of_this_test.answers")
        monkeypatch.delitem(sys.modules, "annex_of_this_test.answers", raising=False)
        if source:
            (tmp_path / "annex_of_this_test").mkdir()
            (tmp_path / "annex_of_this_test" / "answers.py").write_text(source)
        clear()

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    monkeypatch.undo()
    clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "annex_of_this_test"]:
        del sys.modules[name]


def test_without_the_annex_every_question_has_an_answer(answer_with: Callable[[str], None]) -> None:
    answer_with("")
    assert extensions.hint("setting", "max_epoch", ["max_epochs"]) == "; did you mean 'max_epochs'?"
    assert extensions.hint("setting", "gpus", ["max_epochs"]) == ""
    assert str(extensions.missing(Weight(), "TrainModule", "fabric")) == "'Weight' object has no attribute 'fabric'"
    assert extensions.with_advice(Weight) is Weight
    extensions.refuse_uncalled("fit", Weight(), Callback())
    error = TypeError("TrainModule.log() got an unexpected keyword argument 'on_stp'")
    extensions.explain_call(error)
    assert str(error) == "TrainModule.log() got an unexpected keyword argument 'on_stp'"
    foreign = type("Foreign", (), {"__module__": "third_library.models"})()
    assert extensions.adapt(foreign) is foreign
    with pytest.raises(AttributeError, match=r"^run.trainer: nothing in this installation provides it$"):
        extensions.run_attribute(object(), "trainer")


def test_the_table_answers_every_question(answer_with: Callable[[str], None]) -> None:
    paths = {question: f"annex_of_this_test.answers:{question}" for question in QUESTIONS}
    answer_with(
        "from engine.utils.extensions import Answers\n"
        "advice = lambda place, name: f'{place} {name}'\n"
        "def add_advice(cls): cls.advised = True\n"
        "def explain_call(error): error.args = ('explained',)\n"
        "def refuse_uncalled(stage, *owners): raise TypeError(len(owners))\n"
        "view = lambda owner: ('view of', owner)\n"
        f"ANSWERS = Answers({{'third_library': 'annex_of_this_test.answers:view'}}, {{'trainer': 'annex_of_this_test.answers:view'}}, **{paths})\n"
    )
    assert extensions.hint("setting", "gpus") == "; setting gpus"
    assert extensions.with_advice(type("Public", (), {})).advised  # type: ignore[attr-defined]
    error = TypeError("unexplained")
    extensions.explain_call(error)
    assert str(error) == "explained"
    with pytest.raises(TypeError, match=r"^2$"):
        extensions.refuse_uncalled("fit", Weight(), Callback())
    assert extensions.run_attribute("run", "trainer") == ("view of", "run")
    foreign = type("Foreign", (), {"__module__": "third_library.models"})()
    assert extensions.adapt(foreign) == ("view of", foreign)


def test_an_annex_that_lacks_a_package_says_so(answer_with: Callable[[str], None]) -> None:
    answer_with("import a_package_that_is_not_installed\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_installed"):
        extensions.hint("setting", "gpus")


def test_the_functions_in_the_annexs_table_exist() -> None:
    answers = extensions._answers()
    for path in (*answers.run_attributes.values(), *(getattr(answers, question) for question in QUESTIONS)):
        assert callable(resolve_name(path))
    for path in answers.adapters.values():
        module, _, function = path.partition(":")
        spec = find_spec(module)
        assert spec is not None
        assert f"\ndef {function}(" in Path(str(spec.origin)).read_text()


def test_a_copy_that_is_not_installed_has_its_answers(tmp_path: Path) -> None:
    """Without the metadata of any package: the interpreter sees a folder with this one, and torch's packages by ``PYTHONPATH``."""
    code = (
        "import importlib.metadata, sys\n"
        "importlib.metadata.MetadataPathFinder.find_distributions = lambda *arguments, **options: ()\n"
        "from engine import Fit\n"
        "for call in (lambda: Fit(gpus=2), lambda: Fit().run(model=None)):\n"
        "    try:\n        call()\n    except TypeError as error:\n        print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    gpus, model = ran.stdout.splitlines()
    assert "'gpus' is not an argument of Fit; here it is called 'devices'" in gpus
    assert model == "Fit.run() got an unexpected keyword argument 'model'; here it is called 'module'"


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
        ("adapters", "third_library", lambda: extensions.adapt(foreign)),
        ("strategies", "third", lambda: strategies.get("third")),
    ):
        with pytest.raises(ImportError) as caught:
            ask()
        assert str(caught.value).startswith(
            f"the installed package 'third-party' registers the entry point '{name} = {value}' in the group 'engine.{group}'"
        )
        assert reason in str(caught.value)
        assert str(caught.value).endswith("update or uninstall 'third-party'")


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
    assert [name for _, name in frames(refused.value)] == ["test_the_frame_of_an_annex_is_in_nobodys_traceback", "run"]


def test_a_callback_that_handles_a_wrong_call_sees_the_advice(tmp_path: Path) -> None:
    class Logs(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0, on_stp=True)  # type: ignore[call-arg]

    class Sees(Callback):
        def on_exception(self, run: Any, module: Any, exception: BaseException) -> None:
            seen.append(str(exception))

    seen: list[str] = []
    with pytest.raises(TypeError, match="did you mean 'on_step'") as caught:
        fit(tmp_path, callbacks=Sees()).run(Logs(), ones(1))
    assert seen == [str(caught.value)]
