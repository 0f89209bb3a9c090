"""Every module and name of Lightning and Accelerate can be imported through the doors, with or without the originals."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import write_public_names
import write_stubs

import engine.interop.accelerate as A
import engine.interop.lightning as L
from engine.compat.door import Door
from engine.compat.refusals import StandIn

DOORS = {door.package: door for door in sys.meta_path if isinstance(door, Door)}
TOO_SLOW = ("transformers", "datasets", "torchmetrics", "huggingface_hub", "pytest", "unittest")
"""Packages that objects of the originals' modules come from; importing them says nothing about us."""


def paths() -> list[tuple[Door, str, str]]:
    """Each module of the originals, and a path of ours for it."""
    found = []
    for door in DOORS.values():
        for place in door.names.modules:
            inner = f"{door.package}.{place}".removesuffix(".")
            found.append((door, place, inner))
            if place.startswith("pytorch."):
                found.append((door, place, inner.replace(".pytorch.", ".", 1)))
    return found


def by_attributes(path: str) -> Any:
    """What a path gives to a user who has imported ``engine.interop`` alone."""
    value: Any = importlib.import_module("engine")
    for name in path.split(".")[1:]:
        value = getattr(value, name, None)
    return value


def test_every_module_is_importable_and_an_attribute() -> None:
    modules = {path: importlib.import_module(path) for _, _, path in paths()}
    assert [path for path, module in modules.items() if not isinstance(module, ModuleType)] == []
    assert [path for path, module in modules.items() if by_attributes(path) is not module] == []


def test_no_import_of_ours_hides_a_module_of_theirs() -> None:
    """``pl.utilities.warnings`` was Python's module until somebody imported ``lightning.pytorch.utilities.warnings``."""
    hidden = []
    for door, place, path in paths():
        file = getattr(importlib.import_module(path), "__file__", None)
        for statement in ast.parse(Path(file).read_text()).body if file else ():
            if isinstance(statement, ast.Import):
                names = [alias.asname or alias.name.split(".")[0] for alias in statement.names]
                hidden += [f"{path}.{name}" for name in names if f"{place}.{name}".lstrip(".") in door.names.modules]
    assert hidden == []


def test_every_name_is_there() -> None:
    missing = []
    for door, place, path in paths():
        module = importlib.import_module(path)
        for name in {*door.names.names(place), *door.names.public(place)}:
            known = door.names.find(place, name)
            if known is not None and known.kind in ("foreign", "module") and known.module.startswith(TOO_SLOW):
                continue
            if not hasattr(module, name):
                missing.append(f"{path}.{name}")
    assert missing == []


def test_a_class_is_a_class() -> None:
    """Lightning's dicts for ``configure_optimizers`` were ``Any``, which no script can call."""
    others = []
    for door, place, path in paths():
        for name in door.names.names(place):
            known = door.names.find(place, name)
            if known is not None and known.kind == "class":
                value = getattr(importlib.import_module(path), name)
                others += [f"{path}.{name}"] if value is Any or not callable(value) else []
    assert others == []


def test_what_we_have_is_no_stand_in() -> None:
    for package, (content, names) in write_stubs.PACKAGES.items():
        for name in names.split() if package in DOORS else ():
            there = f"{content}.{name}"
            module = importlib.import_module(write_stubs.OTHERWISE.get(there, there))
            assert [each for each in vars(module).get("__all__", ()) if each not in vars(module)] == [], there
    assert not isinstance(A.data_loader.DataLoaderDispatcher, StandIn)
    assert not isinstance(L.strategies.DDPStrategy, StandIn)


def test_an_object_is_one_by_every_path() -> None:
    from_top = L.pytorch.callbacks.Timer
    assert from_top is importlib.import_module("engine.interop.lightning.callbacks.timer").Timer
    assert from_top is importlib.import_module("engine.interop.lightning.pytorch.callbacks.timer").Timer
    assert (
        L.profilers.AdvancedProfiler
        is importlib.import_module("engine.interop.lightning.profilers.advanced").AdvancedProfiler
    )
    assert A.utils.fsdp_utils.save_fsdp_model is A.accelerator.save_fsdp_model
    assert A.hooks.AlignDevicesHook is A.big_modeling.AlignDevicesHook


@pytest.mark.slow
@pytest.mark.parametrize("package", write_public_names.PEERS)
def test_the_file_is_that_of_the_installed_package(package: str) -> None:
    """A process of its own, because the modules of the originals change others when they are imported."""
    installed = pytest.importorskip(package)
    names = DOORS[f"engine.interop.{package}"].names
    if installed.__version__ != names.version:
        pytest.skip(f"{names.file} is of {package} {names.version}")
    code = f"import write_public_names as w; print(w.text({package!r}) == w.file({package!r}).read_text())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == "True", "out of date: python tests/compat/paths/write_public_names.py"
