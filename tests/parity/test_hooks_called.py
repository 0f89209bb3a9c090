"""Which hooks of a module are called, when and with what: as by the installed Lightning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import called
import pytest
from support.ranks import run_script
from support.toys import fit

from engine import TrainModule


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("lightning")
    place = tmp_path_factory.mktemp("lightning")
    found: dict[str, Any] = run_script(Path(called.__file__), place, timeout=300, forked=True).value
    return found


def ours_for(entry: list[Any]) -> list[Any]:
    """What a run gives where Lightning gives ``entry``: a loss as it was returned, which Lightning divides by the window of 2; the clipping's
    algorithm as it is, where Lightning leaves its default to the strategy; ``None`` for a step without a loss."""
    name, *given = entry
    if name in ("configure_gradient_clipping", "clip_gradients"):
        given[-1] = "norm"
    if name == "on_before_backward":
        given[0] = [pytest.approx(2 * given[0][0], abs=1e-5)]
    if name == "on_train_batch_end":
        given[0] = {**given[0], "loss": [pytest.approx(2 * given[0]["loss"][0], abs=1e-5)]} if given[0] else None
    if name == "lr_scheduler_step":
        given[-1] = pytest.approx(given[-1][0], abs=1e-5)
    if name == "backward" and given[0][0] > 1:  # the short last window is divided by what it holds
        given[0] = [pytest.approx(2 * given[0][0], abs=1e-5)]
    return [name, *given]


def test_order_and_arguments_are_lightnings(tmp_path: Path, theirs: dict[str, Any]) -> None:
    module = called.module(TrainModule)
    fit(tmp_path, **called.SETTINGS).run(module, called.data(), called.data())
    ours = json.loads(json.dumps(module.called))
    assert [name for name, *_ in ours] == [name for name, *_ in theirs["called"]]
    assert {name for name, *_ in ours} == set(called.TRAINING)
    assert ours == [ours_for(entry) for entry in theirs["called"]]
    assert module.w.item() == pytest.approx(theirs["w"], abs=1e-6)
