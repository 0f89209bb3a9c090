"""Whose the states of callbacks in a checkpoint are."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of
from support.toys import Weight, fit, ones

from callbacks import EarlyStopping, ModelCheckpoint
from engine import Callback, DataModule


class Counter(Callback):
    """Counts batches, in its own steps."""

    def __init__(self, by: int = 1) -> None:
        self.by, self.count = by, 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += self.by

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Keyed(Counter):
    @property
    def state_key(self) -> str:
        return f"Keyed[by={self.by}]"


class Saves(Callback):
    def on_train_end(self, run: Any, module: Any) -> None:
        run.save_checkpoint()


def resumed(tmp_path: Path, before: list[Callback], after: list[Callback]) -> None:
    """Two batches with the ones, saved; two more with the others."""
    fit(tmp_path, callbacks=[*before, Saves()]).run(Weight(), ones(2))
    fit(tmp_path, max_epochs=2, callbacks=after).run(Weight(), ones(2), resume="last")


@pytest.mark.parametrize("order", [(10, 1), (1, 10), (100, 10, 1)])
def test_a_state_finds_its_callback_among_others_of_its_class(
    tmp_path: Path, order: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    after = [Keyed(by) for by in order]
    with caplog.at_level(logging.WARNING, "engine"):
        resumed(tmp_path, [Keyed(1), Keyed(10)], [*after])
    assert {each.by: each.count for each in after} == {by: by * (2 if by == 100 else 4) for by in order}
    assert not caplog.records


class Total(Counter):
    """The batches of all ranks."""

    def on_train_start(self, run: Any, module: Any) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.run.engine.reduce(torch.tensor(self.count)).item()}


def ranks_count(root: str) -> list[int]:
    by = 1 + 9 * int(os.environ["RANK"])
    count, total = Counter(by), Total(by)
    fit(root, devices="auto", callbacks=[count, total, Saves()]).run(Weight(), ones(4))
    count, total = Counter(by), Total(by)
    fit(root, devices="auto", callbacks=[count, total]).run(Weight(), ones(4), resume="last")
    return [count.count, total.count]


def test_every_rank_gets_the_state_of_rank_0(tmp_path: Path) -> None:
    assert ranks_of(ranks_count, 2, tmp_path) == [[2, 22], [2, 22]]


class _Own(Callback):
    """A callback that the library attaches: users do not know it."""


def test_a_state_that_nobody_takes_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = Keyed(7)
    with caplog.at_level(logging.WARNING, "engine"):
        resumed(tmp_path, [Keyed(1), Keyed(10)], [other, Keyed(10), _Own()])
    assert other.count == 14
    assert "has the state of Keyed[by=1], which is not restored: no callback here has this state_key" in caplog.text
    assert "The state_keys here: Keyed[by=10], Keyed[by=7]\n" in caplog.text


def test_names_out_of_a_checkpoint_do_nothing_to_a_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Hostile(Counter):
        state_key = "\x1b[2J\x07"

        def on_save_checkpoint(self, run: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["\x1b]0;title"] = 1

    with caplog.at_level(logging.WARNING, "engine"):
        resumed(tmp_path, [Hostile()], [])
    assert r"has the state of \x1b[2J\x07, which" in caplog.text
    assert r"entries of on_save_checkpoint (\x1b]0;title), and" in caplog.text
    assert "\x1b" not in caplog.text


class Strange(Keyed):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["cuont"]


def test_a_state_that_does_not_fit_names_its_callback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not fit the callback Keyed\[by=10\]: KeyError: 'cuont'"):
        resumed(tmp_path, [Keyed(1), Keyed(10)], [Keyed(1), Strange(10)])


def test_one_key_for_two_states_is_refused_before_the_first_step(tmp_path: Path) -> None:
    module = Weight()
    with pytest.raises(
        ValueError, match=r"callbacks of Counter and Counter both have the state_key 'Counter'.* override state_key"
    ):
        fit(tmp_path, callbacks=[Counter(), Counter(2)]).run(module, ones(1))
    assert not module.losses

    class Number(Counter):
        state_key = 3  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"Number\.state_key is 3 of type int: return a str"):
        fit(tmp_path, callbacks=Number()).run(module, ones(1))


def test_callbacks_without_a_state_need_no_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "engine"):
        resumed(tmp_path, [Callback(), Callback()], [])
    assert not caplog.records


def test_what_else_nobody_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Adds(Callback):
        def on_save_checkpoint(self, run: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["ema"] = [1.0]

    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return ones(2)

        def state_dict(self) -> dict[str, Any]:
            return {"files": 3}

    fit(tmp_path, callbacks=[Adds(), Saves()]).run(Weight(), Data())
    with caplog.at_level(logging.WARNING, "engine"):
        fit(tmp_path, max_epochs=2).run(Weight(), ones(2), resume="last")
    assert "has the state of a DataModule, and this run has none" in caplog.text
    assert "has entries of on_save_checkpoint (ema), and nothing here defines on_load_checkpoint" in caplog.text


def test_early_stopping_goes_on_beside_another(tmp_path: Path) -> None:
    stopping = EarlyStopping("a", patience=9)
    stopping.wait_count, stopping.best_score = 5, 0.0
    one, other = EarlyStopping("a", patience=9), EarlyStopping("b", patience=9)
    resumed(tmp_path, [stopping, Logs()], [other, one, Logs()])
    assert (one.wait_count, other.wait_count) == (7, 0)  # an epoch's end before, one after


class Logs(Callback):
    def on_before_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        metrics.update(a=1.0, b=1.0)


def test_checkpoints_with_another_interval_keep_their_scores(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, callbacks=ModelCheckpoint(every=1, save_top_k=-1)).run(Weight(), ones(2))
    after, best = ModelCheckpoint(every=2, save_top_k=-1), ModelCheckpoint(monitor="val", save_top_k=-1)
    with caplog.at_level(logging.WARNING, "engine"):
        fit(tmp_path, max_epochs=2, callbacks=[best, after]).run(Weight(), ones(2), ones(1), resume="last")
    assert sorted(after.scores) == [1, 2, 4]
    assert sorted(best.scores) == [2, 4]  # the epoch that was saved before its end is validated now
    assert not [record for record in caplog.records if "which is not restored" in record.getMessage()]


def test_checkpoints_of_versions_that_numbered_callbacks_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Class(Counter):
        state_key = "Counter"  # type: ignore[assignment]

    class First(Counter):
        state_key = "Keyed.0"  # type: ignore[assignment]

    class Second(Counter):
        state_key = "Keyed.1"  # type: ignore[assignment]

    count, one, ten = Counter(5), Keyed(1), Keyed(10)
    resumed(tmp_path, [Second(10), First(1), Class(5)], [one, ten, count])
    assert (count.count, one.count, ten.count) == (20, 4, 40)
