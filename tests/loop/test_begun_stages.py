"""``run.begun_stages``: the steps at which stages of batch size, row length and mixture begin, in whole and in resumed trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit
from torch import Tensor
from torch.utils.data import DataLoader

from callbacks import ModelCheckpoint
from engine import Fit, Mixture, Packed


class Stages(Weight):
    """Notes the stages that had begun at the training's end. The loss does not matter."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values = batch["input_ids"] if isinstance(batch, dict) else batch
        return (self.w * values.float()).mean() * 1e-4

    def on_train_end(self) -> None:
        self.stages = [(stage.step, stage.kind, stage.text) for stage in self.run.begun_stages]


def stages_of(training: Fit, data: Any, **options: Any) -> list[tuple[int, str, str]]:
    module = Stages()
    training.run(module, data, **options)
    return module.stages


def mixture(weights: Any) -> DataLoader[Any]:
    return DataLoader(
        Mixture({"a": torch.zeros(40), "b": torch.ones(40)}, weights, samples=20), batch_size=2, shuffle=True
    )


def packed() -> DataLoader[Any]:
    documents = [[row] * 8 for row in range(20)]
    return DataLoader(Packed(documents, {0: 2, "40 samples": 4, "64 samples": 8}, overflow="split"), batch_size=4)


A_FIRST = {
    0: {"a": 3, "b": 1},
    "13 samples": {"a": 1, "b": 3},
    "40 samples": {"a": 0, "b": 1},
    "900 samples": {"a": 1, "b": 0},
}
SIZES = {0: 4, "18 samples": 8, "1e3 samples": 4}


@pytest.mark.parametrize(
    ("data", "settings", "expected"),
    [
        # 20 rows in steps of 4: 18 samples are reached with the last step of the first epoch.
        (lambda: DataLoader(torch.ones(20), batch_size=2), {"global_batch_size": SIZES}, [(5, "batch size", "8")]),
        # Steps of 2 samples: the 14th sample is in the seventh step, the third epoch begins after the twentieth.
        (lambda: mixture(A_FIRST), {}, [(6, "mixture", "a 25 %, b 75 %"), (20, "mixture", "b 100 %")]),
        # In steps of 8 it is in the second, and an epoch has three steps.
        (
            lambda: mixture(A_FIRST),
            {"accumulate_grad_batches": 4},
            [(1, "mixture", "a 25 %, b 75 %"), (6, "mixture", "b 100 %")],
        ),
        # Steps of 4 samples up to the 20th, then of 8: the third step of the second epoch has the 38th to the 40th sample.
        (
            lambda: mixture({0: {"a": 1, "b": 1}, "37 samples": {"a": 1, "b": 0}}),
            {"global_batch_size": SIZES},
            [(5, "batch size", "8"), (7, "mixture", "a 100 %")],
        ),
        # 20 rows in steps of 4.
        (packed, {}, [(10, "row length", "4"), (16, "row length", "8")]),
        (lambda: mixture({"a": 1, "b": 1}), {"global_batch_size": 4}, []),
    ],
    ids=["batch size", "mixture", "windows", "both", "row length", "none"],
)
def test_stages_begin_at_their_steps(tmp_path: Path, data: Any, settings: Any, expected: Any) -> None:
    assert stages_of(fit(tmp_path, max_epochs=4, **settings), data()) == expected


def test_a_resumed_training_names_the_stage_in_which_it_continues(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"global_batch_size": SIZES, "max_epochs": 4, "callbacks": [ModelCheckpoint()]}
    data = {0: {"a": 1, "b": 1}, "37 samples": {"a": 1, "b": 0}}
    first = stages_of(fit(tmp_path, max_steps=6, **settings), mixture(data))
    assert first == [(5, "batch size", "8")]
    rest = stages_of(fit(tmp_path, **settings), mixture(data), resume="last")
    assert rest == [(6, "batch size", "8"), (7, "mixture", "a 100 %")]
