"""The reference: every exported name, its methods and their arguments are documented, in markup that renders; and what documents name exists."""

from __future__ import annotations

import ast
import configparser
import importlib
import importlib.util
import inspect
import itertools
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tools.api_reference import MODULES

from engine import Callback

ROOT = Path(__file__).resolve().parents[2]
OWN = ("engine", "callbacks")
EXPORTED = [
    (module, name)
    for module in MODULES
    for name in importlib.import_module(module).__all__
    if name not in ("__version__", "launch", "losses", "optim")
]


def exported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def own_bases(cls: type) -> list[type]:
    return [each for each in cls.__mro__ if each.__module__.split(".")[0] in OWN]


def methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods and properties of a class that it, or a class of ours below it, defines; ``__init__`` too where it is written."""
    for name in sorted({name for each in own_bases(cls) for name in vars(each)}):
        found = inspect.getattr_static(cls, name)
        function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if inspect.isfunction(function) and (
            not name.startswith("_") or (name == "__init__" and "__wrapped__" not in dir(cls))
        ):
            yield name, function


@cache
def field_names(cls: type) -> set[str]:
    """Attributes of a class with a docstring under them."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    pairs = [(first, second) for first, second in itertools.pairwise(body) if isinstance(first, ast.AnnAssign)]
    return {
        first.target.id
        for first, second in pairs
        if isinstance(second, ast.Expr) and isinstance(first.target, ast.Name)
    }


def texts(cls: type) -> str:
    """The docstrings of a class and its bases of ours."""
    return "\n".join([inspect.cleandoc(each.__doc__ or "") for each in own_bases(cls)])


def names(text: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def arguments(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.items()
    return [
        name
        for name, each in found
        if name not in ("self", "cls") and each.kind not in kinds and not name.startswith("_")
    ]


def problems(module: str, name: str) -> list[str]:
    """What the reference would lack of one exported name."""
    owner = exported(module, name)
    if not isinstance(owner, type):
        text = inspect.getdoc(owner) or ""
        lacks = [f"{name}({each}) is not named" for each in arguments(owner) if not names(text, each)]
        return lacks if text else [f"{name} has no docstring"]
    about = texts(owner) + (texts(Callback) if ":class:`engine.Callback`'s" in texts(owner) else "")
    found = [] if owner.__doc__ else [f"{name} has no docstring"]
    documented = set().union(*(field_names(each) for each in own_bases(owner)))
    for method, function in methods(owner):
        if method in documented:
            continue
        text = inspect.getdoc(function) or next(
            (doc for each in own_bases(owner) if (doc := getattr(vars(each).get(method), "__doc__", None))), ""
        )
        if not text and not names(about, method) and method != "__init__":
            found.append(f"{name}.{method} has no docstring")
        inherited = " ".join(getattr(vars(each).get(method), "__doc__", None) or "" for each in own_bases(owner))
        for each in arguments(function):
            if each not in documented and not names(f"{text} {inherited} {about}", each):
                found.append(f"{name}.{method}({each}) is not named")
    return found


@pytest.mark.parametrize(("module", "name"), EXPORTED)
def test_every_public_name_and_argument_is_documented(module: str, name: str) -> None:
    assert problems(module, name) == []


def broken(text: str) -> bool:
    """Whether backticks of a docstring do not pair."""
    return re.sub(r"``[^`]*``|`[^`]*`", "", text.replace("```", "")).count("`") > 0


def docstrings(owner: Any) -> Iterator[str]:
    yield inspect.getdoc(owner) or ""
    if isinstance(owner, type):
        for each in own_bases(owner):
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each)))):
                if (
                    isinstance(node, ast.Expr)
                    and isinstance(node.value, ast.Constant)
                    and isinstance(node.value.value, str)
                ):
                    yield inspect.cleandoc(node.value.value)


@pytest.mark.parametrize(("module", "name"), EXPORTED)
def test_markup_is_whole(module: str, name: str) -> None:
    assert [text for text in docstrings(exported(module, name)) if broken(text)] == []


def test_broken_markup_is_found() -> None:
    assert broken("one ``two` three")
    assert broken("`one")
    assert not broken("``one`` and :meth:`two`")


@cache
def leads_somewhere(target: str) -> bool:
    above, _, name = target.rpartition(".")
    if target.startswith("engine.huggingface."):  # loading it loads transformers: 5 s
        sources = (ROOT / "engine" / "compat" / "transformers").glob("*.py")
        return any(re.search(rf"^ *(class|def) {name}\b", path.read_text(), re.MULTILINE) for path in sources)
    try:
        found: Any = importlib.import_module(above)
    except ModuleNotFoundError:  # an attribute of a class
        module, _, owner = above.rpartition(".")
        found = getattr(importlib.import_module(module), owner)
    return (
        hasattr(found, name)
        or name in getattr(found, "__annotations__", {})
        or importlib.util.find_spec(target) is not None
    )


def test_what_docstrings_refer_to_is_exported() -> None:
    """``:class:`engine.Fit``` leads somewhere."""
    for path in (each for package in OWN for each in (ROOT / package).rglob("*.py")):
        for target in re.findall(r":(?:class|func|attr|meth|mod):`~?((?:engine|callbacks)\.[\w.]+)`", path.read_text()):
            assert leads_somewhere(target), f"{path}: {target}"


@pytest.mark.parametrize("page", sorted(each.name for each in (ROOT / ".github").glob("*.md")))
def test_files_that_pages_name_exist(page: str) -> None:
    text = (ROOT / ".github" / page).read_text()
    for found in re.findall(r"`((?:engine|callbacks|tests|examples|\.github|\.ci)/[\w./-]*)`", text):
        assert (ROOT / found).exists(), found
    for found in re.findall(r"`([A-Z]+\.md)`", text):
        assert (ROOT / ".github" / found).exists(), found


def test_the_licence_is_in_the_package() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    text = (ROOT / settings["metadata"]["license_files"]).read_text()
    assert settings["metadata"]["license"] == "Apache-2.0"
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert "LICENSE" in settings["options.package_data"]["engine"]


@pytest.mark.slow
def test_the_reference_builds(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    # A process of its own: building takes the attributes away that only raise errors.
    subprocess.run([sys.executable, ROOT / "tests" / "tools" / "api_reference.py", tmp_path], check=True, timeout=300)
    text = (tmp_path / "engine.html").read_text()
    for found in ("Fit.run", "Engine.prepare", "Callback.on_train_start", "DamagedCheckpoint", "Environment"):
        assert f'id="{found}"' in text
    assert 'id="Fit.fit"' not in text
    assert 'id="ModelCheckpoint.__init__"' in (tmp_path / "callbacks.html").read_text()
    assert 'id="notebook"' in (tmp_path / "engine" / "launch.html").read_text()
