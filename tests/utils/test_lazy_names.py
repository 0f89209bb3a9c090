from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import engine


@pytest.fixture
def drawer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package ``drawer`` whose stub has a name of a module, one of a package below it, a module and a hidden name."""
    package = tmp_path / "drawer"
    (package / "below").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from engine.utils.lazy_names import lazy_names\n"
        '__getattr__, __dir__, __all__ = lazy_names(__name__, __file__, hidden=["Spare"])\n'
    )
    (package / "__init__.pyi").write_text(
        '"""Not from .knife import Blade."""\nfrom . import fork as fork\n'
        "from .below.spoon import Spare as Spare\nfrom .below.spoon import Spoon as Spoon\n"
        "from .knife import Blade as Knife\n\nversion: str\n"
    )
    (package / "below" / "spoon.py").write_text("class Spoon: ...\nclass Spare: ...\n")
    (package / "fork.py").write_text("tines = 4\n")
    (package / "knife.py").write_text("class Blade: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("drawer")
    for name in [name for name in sys.modules if name.partition(".")[0] == "drawer"]:
        del sys.modules[name]


def test_a_name_is_imported_when_it_is_used(drawer: ModuleType) -> None:
    assert "drawer.below.spoon" not in sys.modules
    assert drawer.Spoon.__module__ == "drawer.below.spoon"
    assert vars(drawer)["Spoon"] is drawer.Spoon  # the next use does not ask for it
    assert drawer.Spare.__name__ == "Spare"
    assert "drawer.knife" not in sys.modules
    assert drawer.Knife.__name__ == "Blade"
    assert drawer.fork.tines == 4


def test_lists_of_names(drawer: ModuleType) -> None:
    assert drawer.__all__ == ["Knife", "Spoon", "fork"]
    assert {"Knife", "Spoon", "Spare", "fork", "__name__"} <= set(dir(drawer))
    assert "version" not in dir(drawer)
    with pytest.raises(AttributeError, match=r"^module 'drawer' has no attribute 'Bowl'; it has Knife, Spoon, fork$"):
        drawer.Bowl  # noqa: B018
    star: dict[str, object] = {}
    exec("from drawer import *", star)
    assert {"Knife", "Spoon", "fork"} <= star.keys()


def test_an_error_of_a_module_is_not_hidden(drawer: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "drawer" / "knife.py").write_text("import a_module_that_is_missing\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        drawer.Knife  # noqa: B018


def test_the_names_of_engine() -> None:
    assert {"Fit", "launch", "__version__", "terminal_text"} <= set(engine.__all__)
    assert "callbacks" not in engine.__all__
    for name in engine.__all__:
        assert getattr(engine, name, None) is not None
        assert name in dir(engine)
    with pytest.raises(AttributeError, match=r"^module 'engine' has no attribute 'Fitt'; it has .*Fit, "):
        engine.Fitt  # noqa: B018


def test_importing_all_of_engine_does_not_import_the_callbacks() -> None:
    code = "import sys; from engine import *; assert Fit and not {'callbacks', 'engine.callbacks'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
