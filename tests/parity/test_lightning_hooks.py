"""The same module, with overrides, trained by the installed Lightning and by ``Fit``: the same weights."""

from __future__ import annotations

from pathlib import Path

import hooked
import pytest
from support.ranks import run_script
from support.toys import fit

from engine import TrainModule


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    pytest.importorskip("lightning")
    found: dict[str, list[float]] = run_script(
        Path(hooked.__file__), tmp_path_factory.mktemp("lightning"), timeout=300, forked=True
    ).value
    return found


@pytest.mark.parametrize("name", hooked.SETTINGS)
def test_weights_are_lightnings(tmp_path: Path, theirs: dict[str, list[float]], name: str) -> None:
    module = hooked.modules(TrainModule)[name]()
    before = hooked.weights(module)
    fit(tmp_path, max_epochs=3, **hooked.SETTINGS[name]).run(
        module, hooked.data(), hooked.data() if name == "Modes" else None
    )
    assert hooked.weights(module) == pytest.approx(theirs[name], rel=0, abs=1e-12)
    assert hooked.weights(module) != before
