"""Names stand for what is there: in ``engine``, in ``engine.interop``, or nowhere."""

from __future__ import annotations

import importlib

import pytest

import engine
from engine.compat.migrate import peers
from engine.compat.migrate.counterparts import RENAMED, counterpart, failed_import, is_package
from engine.compat.migrate.imports import Api
from engine.compat.peer_names import PeerNames


@pytest.mark.parametrize(
    ("library", "path", "verdict", "where"),
    [
        ("lightning", "LightningModule", "as is", "engine.TrainModule"),
        ("lightning", "core.module.LightningModule", "as is", "engine.TrainModule"),
        ("lightning", "callbacks.EarlyStopping", "as is", "callbacks.EarlyStopping"),
        ("lightning", "callbacks.early_stopping.EarlyStopping", "as is", "callbacks.EarlyStopping"),
        ("lightning", "loggers.CSVLogger", "as is", "callbacks.loggers.CSVLogger"),
        ("lightning", "utilities.types.STEP_OUTPUT", "interop", "engine.interop.lightning.utilities.types.STEP_OUTPUT"),
        ("lightning", "strategies.DDPStrategy", "interop", "engine.interop.lightning.strategies.DDPStrategy"),
        ("fabric", "Fabric", "as is", "engine.Engine"),
        ("accelerate", "Accelerator", "as is", "engine.Engine"),
        ("accelerate", "utils.set_seed", "as is", "engine.seed_everything"),
        ("accelerate", "PartialState", "interop", "engine.interop.accelerate.PartialState"),
        ("lightning", "plugins.NoSuch", "change", "a precision is Fit(precision=...)"),
        ("lightning", "utilities.no_such", "change", "engine.interop.lightning has nothing of this name"),
    ],
)
def test_counterparts(library: str, path: str, verdict: str, where: str) -> None:
    found = counterpart(Api(library, path))
    assert found.verdict == verdict
    assert found.sentence.startswith(where)


@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("lightning", peers.LIGHTNING.names),
        ("accelerate", peers.ACCELERATE.names),
    ],
)
def test_every_public_import_works(package: str, names: PeerNames) -> None:
    dotted = {path: f"{package}.{path}".rstrip(".") for path in names.modules}
    assert [path for path in dotted.values() if failed_import(path)] == []
    found = [
        f"{path}.{name}" for inner, path in dotted.items() for name in names.public(inner) if failed_import(path, name)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("api", "is_refused"),
    [
        (Api("lightning", "strategies.xla.XLAStrategy"), True),
        (Api("lightning", "profilers.pytorch.RegisterRecordFunction"), True),
        (Api("fabric", "Fabric"), True),
        (Api("accelerate", "utils.modeling.get_balanced_memory"), True),
        (Api("lightning", "utilities.exceptions.MisconfigurationException"), False),
        (Api("lightning", "LightningModule"), False),
    ],
)
def test_a_stand_in_needs_a_change_where_it_is_used(api: Api, is_refused: bool) -> None:
    assert counterpart(api).verdict != "change"
    assert bool(counterpart(api).refused) == is_refused


def test_the_names_in_the_table_are_there_and_here() -> None:
    theirs = [
        pytest.importorskip("lightning"),
        pytest.importorskip("accelerate.utils"),
        pytest.importorskip("accelerate"),
    ]
    theirs.append(importlib.import_module("lightning.pytorch.utilities"))
    assert [name for name in RENAMED if not any(hasattr(each, name) for each in theirs)] == []
    assert [name for name in RENAMED.values() if not hasattr(engine, name)] == []


def test_parts_of_a_library_are_no_use() -> None:
    assert all(is_package(Api("lightning", path)) for path in ("", "callbacks", "loggers", "utilities"))
    assert not is_package(Api("lightning", "seed_everything"))
