"""Ten callbacks, the built-in kinds among them, are called in the order of the table in engine/README.md, each event by all of them in turn."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from support.toys import Weight, fit, ones

from callbacks import EMA, CSVLogger, LambdaCallback, LearningRateMonitor, ModelCheckpoint, ThroughputMonitor
from engine import Callback

EVENTS = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
EPOCH = [
    "on_train_epoch_start",
    *("on_train_batch_start", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end"),
    *("on_before_log", "on_log"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_before_log", "on_log", "on_validation_end"),
    "on_train_epoch_end",
]
TABLE = [
    *("setup", "on_fit_start"),
    *("on_sanity_check_start", "on_validation_start", "on_validation_epoch_start"),
    *("on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"),
    *("on_sanity_check_end", "on_train_start"),
    *EPOCH,
    "on_before_log",  # the epoch's values; there are none
    "on_train_epoch_end",  # of those that run last: now the state can be saved
    *("on_train_end", "on_save_checkpoint", "on_train_end"),  # ModelCheckpoint runs last, and so does the fifth
    *("on_checkpoint_saved", "on_fit_end", "teardown"),
]


class Recorded(Callback):
    def __init__(self, number: int, calls: list[tuple[str, int]], last: bool = False) -> None:
        self.number, self.runs_last = number, last
        for event in EVENTS:
            setattr(self, event, lambda *args, event=event: calls.append((event, number)))

    @property
    def state_key(self) -> str:
        return f"Recorded {self.number}"


class Logs(Weight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 1.0)
        return super().training_step(batch, batch_idx)


def test_ten_callbacks_are_called_as_the_table_says(tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []
    lambdas = LambdaCallback(**{event: lambda *args, event=event: calls.append((event, 1)) for event in EVENTS})
    given = [
        Recorded(0, calls),
        CSVLogger(),
        lambdas,
        LearningRateMonitor(),
        Recorded(2, calls),
        EMA(0.5),
        ModelCheckpoint(every=None, asynchronous=False),
        Recorded(4, calls, last=True),
        ThroughputMonitor(),
        Recorded(3, calls),
    ]
    module = Logs()
    fit(tmp_path, max_epochs=1, num_sanity_val_steps=1, log_every_n_steps=1, callbacks=given).run(
        module, ones(1), ones(1)
    )
    events = [event for event, _ in groupby(calls, key=lambda call: call[0])]
    assert events == TABLE
    apart = {"on_train_epoch_end": [[0, 1, 2, 3], [4]], "on_train_end": [[0, 1, 2, 3], [4]]}
    for event, group in groupby(calls, key=lambda call: call[0]):
        expected = apart[event].pop(0) if event in apart else [0, 1, 2, 3, 4]
        assert [number for _, number in group] == expected, event
