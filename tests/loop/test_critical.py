"""``Callback.critical = False``: an error in a callback that only watches does not end the run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones

from callbacks import CSVLogger, ModelCheckpoint
from engine import Callback, HangError

EVENTS = [name for name in vars(Callback) if name.startswith("on_") and name != "on_exception"]


class Watches(Callback):
    """Fails in one event, and notes all calls."""

    critical = False
    takes = frozenset({"text"})

    def __init__(self, fails_in: str) -> None:
        self.calls: list[str] = []
        for name in (*EVENTS, "setup", "teardown", "state_dict", "load_state_dict"):
            setattr(self, name, lambda *args, name=name: self._call(name, fails_in))

    def _call(self, name: str, fails_in: str) -> Any:
        self.calls.append(name)
        if name == fails_in:
            raise ConnectionError(f"the tracker is gone, in {name}")
        return {}


def kept(**settings: Any) -> ModelCheckpoint:
    return ModelCheckpoint(every="2 steps", asynchronous=False, **settings)


@pytest.mark.parametrize("event", [*EVENTS, "teardown", "state_dict"])
def test_no_event_of_it_ends_a_run(tmp_path: Path, event: str, caplog: pytest.LogCaptureFixture) -> None:
    if "load" in event:
        fit(tmp_path, max_steps=2, callbacks=[Watches(""), kept()]).run(Weight(), ones(6))
    watches, csv = Watches(event), CSVLogger()
    trainer = fit(tmp_path, num_sanity_val_steps=1, max_epochs=1, log_every_n_steps=1, callbacks=[watches, csv, kept()])
    method = next((stage for stage in ("test", "predict") if stage in event), "run")
    with caplog.at_level(logging.ERROR, "engine"):
        if method == "run":
            resume = "last" if "load" in event else None
            result = trainer.run(Predicts(), ones(6), ones(1), resume=resume)
            assert (result.status, result.step) == ("completed", 6)
        else:
            getattr(trainer, method)(Predicts(), ones(2))
    assert watches.calls[-1] == "teardown"
    assert event in watches.calls
    records = [each for each in caplog.records if "Watches" in each.getMessage()]
    assert all("ConnectionError" in str(each.exc_text) for each in records)
    if event not in ("teardown", "state_dict"):
        assert len(records) == 1
        assert f"Watches.{event} failed; the run continues without Watches" in records[0].getMessage()
        after = watches.calls[watches.calls.index(event) + 1 :]
        assert {*after} <= {"state_dict", "load_state_dict", "teardown"}


class Predicts(Weight):
    def on_train_start(self) -> None:
        self.log_text("note", "begins")

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return batch


def test_before_the_first_step_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="in setup"):
        fit(tmp_path, callbacks=Watches("setup")).run(Weight(), ones(2))
    fit(tmp_path, max_steps=2, callbacks=[Watches(""), kept()]).run(Weight(), ones(6))
    with pytest.raises(ConnectionError, match="in load_state_dict"):
        fit(tmp_path, max_steps=4, callbacks=[Watches("load_state_dict"), kept()]).run(Weight(), ones(6), resume="last")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, HangError])
def test_ctrl_c_and_the_report_of_a_hang_in_it_are_not_kept_back(tmp_path: Path, kind: type[BaseException]) -> None:
    class Stops(Callback):
        critical = False

        def on_train_batch_end(self, *args: Any) -> None:
            raise kind("in the middle of it")

    with pytest.raises(kind, match="in the middle of it"):
        fit(tmp_path, callbacks=Stops()).run(Weight(), ones(2))


def test_the_next_run_calls_it_again(tmp_path: Path) -> None:
    watches = Watches("on_train_start")
    for _ in range(2):
        fit(tmp_path, callbacks=watches).run(Weight(), ones(1))
    assert watches.calls.count("on_train_start") == 2


def test_a_run_has_its_id_from_setup_on(tmp_path: Path) -> None:
    ids: list[str] = []

    class Notes(Callback):
        def setup(self, run: Any, module: Any, stage: str) -> None:
            ids.append(run.id)

    first = fit(tmp_path, max_steps=2, callbacks=[Notes(), kept()])
    first.run(Weight(), ones(4))
    first.validate(Weight(), ones(1), checkpoint="last")
    fit(tmp_path, max_steps=4, callbacks=[Notes(), kept()]).run(Weight(), ones(4), resume="last")
    fit(tmp_path, callbacks=Notes()).run(Weight(), ones(1))
    assert len({*ids[:3]}) == 1
    assert ids[3] != ids[0]
