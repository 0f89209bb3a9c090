"""What users import, ``engine.interop`` and ``engine.huggingface``, is what stands in ``engine.compat``: each class exists once."""

from __future__ import annotations

import importlib
import pickle
import sys

import pytest
import write_stubs

import engine.interop.lightning as L
from engine.compat.lightning import callbacks
from engine.compat.lightning.names import MODULES
from engine.interop import Moved


@pytest.mark.parametrize("package", write_stubs.PACKAGES)
def test_a_module_is_the_same_under_both_paths(package: str) -> None:
    if package == "engine.huggingface":
        pytest.importorskip("transformers")
    importlib.import_module(package)
    content, names = write_stubs.PACKAGES[package]
    assert Moved.packages[package] == content
    for name in names.split():
        there = f"{content}.{name}"
        module = importlib.import_module(write_stubs.OTHERWISE.get(there, there))
        assert importlib.import_module(f"{package}.{name}") is module
        assert module.__name__.startswith("engine.compat.")
        assert module.__spec__ is not None
        assert module.__spec__.name == module.__name__


def test_lightnings_paths_lead_to_the_same_modules() -> None:
    for part, paths in MODULES.items():
        for path in paths.split():
            module = importlib.import_module(f"{L.__name__}.{path}")
            assert module is getattr(L, part)
            assert module is importlib.import_module(f"{L.__name__}.pytorch.{path}")


def test_a_module_that_does_not_exist_is_missed_under_the_path_that_was_asked_for() -> None:
    for name in ("engine.interop.lightning.not_there", "engine.interop.accelerate.utils.not_there"):
        with pytest.raises(ModuleNotFoundError, match=f"^No module named '{name}'$"):
            importlib.import_module(name)


def test_what_was_pickled_under_an_old_path_is_found() -> None:
    by_path = b"cengine.interop.lightning.callbacks\nModelCheckpoint\n."
    assert pickle.loads(by_path) is callbacks.ModelCheckpoint
    assert sys.modules["engine.interop.lightning.callbacks"] is callbacks


def test_type_checkers_find_the_same_modules() -> None:
    texts = {path: path.read_text() if path.exists() else "" for path in write_stubs.stubs()}
    assert texts == write_stubs.stubs(), "out of date: python tests/compat/paths/write_stubs.py"


def test_classes_are_named_by_the_path_that_users_import() -> None:
    """LightningCLI writes it into config.yaml, and pickles have it."""
    for cls in (L.callbacks.ModelCheckpoint, L.callbacks.LearningRateMonitor, L.loggers.CSVLogger, L.Trainer):
        assert cls.__module__.startswith("engine.interop.lightning.")
        assert pickle.loads(pickle.dumps(cls)) is cls
