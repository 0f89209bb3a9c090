"""``Fit(reload_best=True)``: the module has the best checkpoint's weights after the run, and everything else is the training's end."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.ranks import ranks_of_file
from support.toys import Weight, fit, ones

from callbacks import ModelCheckpoint
from engine import Callback, Run, TrainModule


class Worsens(Weight):
    """Its score is the best after step 2."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("score", abs(self.global_step - 2.0))


class Weights(Callback):
    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_train_batch_end(self, run: Run, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.by_step[run.step] = weight_of(module)


def weight_of(module: Any) -> float:
    return float(next(module.parameters()).detach().sum())


def best(**arguments: Any) -> ModelCheckpoint:
    return ModelCheckpoint(**{"every": "1 steps", "monitor": "score", **arguments})


def trained(root: Path, **settings: Any) -> tuple[Any, Weights, Any]:
    weights, module = Weights(), Worsens()
    arguments = {"max_steps": 4, "val_every": 1, "reload_best": True, "callbacks": [weights, best()]}
    result = fit(root, **{**arguments, **settings}).run(module, ones(4), ones(1))
    return module, weights, result


def test_the_module_has_the_best_weights_and_the_result_is_the_last_steps(tmp_path: Path) -> None:
    module, weights, result = trained(tmp_path)
    assert weight_of(module) == weights.by_step[2] != weights.by_step[4]
    assert (result.step, result.metrics["score"]) == (4, 2.0)
    assert str(result.best_checkpoint).endswith("step=00000002")
    assert str(result.last_checkpoint).endswith("step=00000004")


def test_a_resumed_run_goes_on_from_the_last_weights(tmp_path: Path) -> None:
    trained(tmp_path)
    module = Worsens()
    weights = Weights()
    arguments = {"max_steps": 6, "val_every": 1, "reload_best": True, "callbacks": [weights, best()]}
    fit(tmp_path, **arguments).run(module, ones(4), ones(1), resume="last")
    straight = trained(tmp_path / "straight", max_steps=6)[1]
    assert weights.by_step == {step: straight.by_step[step] for step in (5, 6)}
    assert weight_of(module) == straight.by_step[2]


def test_without_a_score_it_is_refused_before_the_first_step(tmp_path: Path) -> None:
    for callbacks in ([], [ModelCheckpoint()]):
        weights = Weights()
        with pytest.raises(ValueError, match=r"reload_best=True needs .*ModelCheckpoint\(monitor="):
            trained(tmp_path, callbacks=[weights, *callbacks])
        assert not weights.by_step


def test_a_run_that_scored_nothing_keeps_its_weights_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = Weights()
    module, _, result = trained(
        tmp_path, max_steps=1, val_every="1 epochs", callbacks=[weights, best(every="1 epochs")]
    )
    assert result.step == 1
    assert weight_of(module) == weights.by_step[1]
    assert "the module keeps its last weights" in caplog.text


def rank_reload() -> list[float]:
    found = []
    for strategy in ("ddp", "fsdp"):
        with tempfile.TemporaryDirectory() as root:
            module = Worsens()
            settings = {"devices": "auto", "max_steps": 4, "val_every": 1, "reload_best": True, "strategy": strategy}
            run = fit(Path(root), **settings, callbacks=[best()])
            run.run(module, ones(8), ones(2))
            found.append(sum(float(value.sum()) for value in run.state_dict(module, everywhere=True).values()))
    return found


def test_two_ranks_reload_under_ddp_and_fsdp(tmp_path: Path) -> None:
    weights = trained(tmp_path)[1]
    assert ranks_of_file(__file__, 2)["reload"] == [[weights.by_step[2]] * 2] * 2
