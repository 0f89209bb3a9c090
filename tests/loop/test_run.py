"""Run: counters, stopping, what it publishes, and checkpoints."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from cProfile import Profile
from pathlib import Path
from pstats import Stats
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones
from torch import Tensor

from callbacks import CSVLogger, ModelCheckpoint
from engine import Callback, Run
from engine.config import secret_text


class Calls(Callback):
    """Calls ``then(run)`` at the end of each batch."""

    def __init__(self, then: Callable[[Run], Any]) -> None:
        self.then = then

    def on_train_batch_end(self, run: Run, *args: Any) -> None:
        self.then(run)


def test_a_run_within_a_run_of_its_module_is_an_error(tmp_path: Path) -> None:
    nests = Calls(lambda run: fit(tmp_path).run(run.module, ones(3)))
    with pytest.raises(RuntimeError, match=r"Weight is in a run.*give that one a copy"):
        fit(tmp_path, callbacks=nests).run(Weight(), ones(3))
    copies = Calls(lambda run: fit(tmp_path).run(copy.deepcopy(run.module), ones(3)))
    assert fit(tmp_path, callbacks=copies).run(Weight(), ones(3)).step == 3


def test_an_evaluation_in_a_hook_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    class Evaluates(Weight):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            again = fit(tmp_path / "inner")
            assert again.validate(self, ones(2)) == [{"val": -float(self.global_step)}]
            seen.append(
                (len(again.predict(self, ones(2))), self.attached, self.global_step, self.run.stage, self.training)
            )
            self.log("after", float(self.global_step))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

    seen: list[Any] = []
    result = fit(tmp_path).run(Evaluates(), ones(2))
    assert seen == [(2, True, 1, "fit", True), (2, True, 2, "fit", True)]
    assert result.metrics["after"] == 2.0


def test_counters_count_steps_and_micro_batches(tmp_path: Path) -> None:
    seen = []

    def note(run: Run) -> None:
        s = run.state
        seen.append((s.epoch, s.step, s.batch_idx, s.batches))

    result = fit(tmp_path, max_epochs=2, accumulate_grad_batches=2, callbacks=Calls(note)).run(Weight(), ones(3))
    assert seen == [(0, 0, 1, 1), (0, 1, 2, 2), (0, 2, 3, 3), (1, 2, 1, 4), (1, 3, 2, 5), (1, 4, 3, 6)]
    assert (result.status, result.stop_reason, result.epoch, result.step) == ("completed", "max_epochs=2 reached", 2, 4)


@pytest.mark.parametrize(("max_epochs", "epochs"), [(2, 2), (1, 2)])
def test_a_resumed_training_that_is_done_says_so(
    tmp_path: Path, max_epochs: int, epochs: int, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, max_epochs=2, callbacks=ModelCheckpoint()).run(Weight(), ones(3))
    result = fit(tmp_path, max_epochs=max_epochs).run(Weight(), ones(3), resume="last")
    first = f"completed (max_epochs={max_epochs} was reached before, nothing left to train): {epochs} epochs, 6 steps"
    assert str(result).splitlines()[0] == first
    assert caplog.messages[-1] == (
        f"nothing was trained: the resumed training is at epoch 2, and max_epochs={max_epochs} was reached before. Limits count from the beginning "
        "of the training: give a higher one to go on, or Resume(path, weights_only=True) to begin a new training with these weights"
    )
    caplog.clear()
    more = fit(tmp_path, max_epochs=3).run(Weight(), ones(3), resume="last")
    assert (more.stop_reason, more.step) == ("max_epochs=3 reached", 9)
    assert "nothing was trained" not in caplog.text


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ({"max_steps": 4}, "at step 6, and max_steps=4 was reached before"),
        ({"max_time": "0.000001 s"}, "s of training, and max_time="),
    ],
)
def test_other_limits_that_were_passed_before(
    tmp_path: Path, limit: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, max_epochs=2, callbacks=ModelCheckpoint()).run(Weight(), ones(3))
    result = fit(tmp_path, **{"max_epochs": 9, **limit}).run(Weight(), ones(3), resume="last")
    assert "was reached before, nothing left to train" in result.stop_reason
    assert words in caplog.text


def test_a_stop_in_the_middle_of_a_window_waits_for_its_step(tmp_path: Path) -> None:
    stopping = []

    def stop(run: Run) -> None:
        if run.state.batches == 3:
            run.stop("enough")
            run.stop("a later reason")
        stopping.append(run.stopping)

    result = fit(tmp_path, max_epochs=2, accumulate_grad_batches=2, callbacks=Calls(stop)).run(Weight(), ones(6))
    assert (result.status, result.stop_reason, result.epoch, result.step) == ("stopped", "enough", 0, 2)
    assert stopping == [False, False, True, True]


def test_the_newest_values_are_published(tmp_path: Path) -> None:
    published: list[tuple[int, dict[str, float]]] = []

    class Logs(Weight):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("n", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)
            return super().training_step(batch, batch_idx)

    class Watches(Callback):
        def on_before_log(self, run: Run, module: Any, metrics: dict[str, float], step: int) -> None:
            metrics["added"] = 1.0

        def on_log(self, run: Run, module: Any, metrics: dict[str, float], step: int) -> None:
            published.append((step, dict(metrics)))
            progress.append(dict(run.progress))

    progress: list[dict[str, float]] = []
    result = fit(tmp_path, log_every_n_steps=2, callbacks=Watches()).run(Logs(), ones(5))
    assert published == [
        *((step, {"n_step": step - 1.0, "added": 1.0}) for step in (1, 2, 4, 5)),  # the first, the multiples, the last
        (5, {"n_epoch": 2.0, "added": 1.0}),
    ]
    assert progress == [
        {"n_step": 0.0},
        {"n_step": 1.0},
        {"n_step": 3.0},
        {"n_step": 4.0},
        {"n_step": 4.0, "n_epoch": 2.0},
    ]
    assert result.metrics == {"n_step": 4.0, "n_epoch": 2.0, "n": 2.0, "added": 1.0}


def test_without_a_progress_bar_one_line_an_interval_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Logs(Weight):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("n", float(batch_idx))
            return super().training_step(batch, batch_idx)

    class Listens(Callback):
        def on_log(self, *args: Any) -> None: ...

    class Shows(Callback):
        shows_progress = True

    with caplog.at_level("INFO", logger="engine"):
        fit(tmp_path, log_every_n_steps=2, callbacks=Listens()).run(Logs(), ones(4))
        start, first, *lines = [r.getMessage() for r in caplog.records]
        assert start.startswith("training with 1 process (cpu), strategy single")
        assert first.startswith("first step done, ")
        assert lines == [
            "epoch 0 step 1: n=0",
            "epoch 0 step 2: n=1",
            "epoch 0 step 4: n=3",
        ]
        caplog.clear()
        fit(tmp_path, log_every_n_steps=2, callbacks=Shows()).run(Logs(), ones(4))
        assert not [r for r in caplog.records if "step" in r.getMessage()]


def test_the_times_are_split(tmp_path: Path) -> None:
    slept = dict.fromkeys(("data", "compute", "validation", "checkpoint", "other"), 0.0)
    span: list[float] = []

    def busy(kind: str, seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        slept[kind] += time.perf_counter() - began

    class Slow(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            for _ in range(2):
                busy("data", 0.05)
                yield torch.ones(1)

    class Validates(Weight):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            busy("compute", 0.03)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
            busy("validation", 0.1)

        def setup(self, stage: str) -> None:
            busy("other", 0.04)

    class Saves(Callback):
        def on_train_epoch_start(self, run: Run, *args: Any) -> None:
            span.append(time.perf_counter())

        def on_train_epoch_end(self, run: Run, *args: Any) -> None:
            span.append(time.perf_counter())

        def on_train_batch_end(self, run: Run, *args: Any) -> None:
            run.save_checkpoint()
            busy("compute", 0.02)

        def on_save_checkpoint(self, *args: Any) -> None:
            busy("checkpoint", 0.2)  # counts as saving, and not as computing as well

    data = torch.utils.data.DataLoader(Slow(), batch_size=None)
    times = fit(tmp_path, callbacks=Saves()).run(Validates(), data, [torch.ones(1, 1)]).times
    assert all(getattr(times, kind) >= seconds for kind, seconds in slept.items())
    inside = [kind for kind in slept if kind != "other"]
    for kind in inside:  # what was slept for another kind is not counted here too, however busy the machine is
        rest = sum(slept[other] for other in inside if other != kind)
        assert getattr(times, kind) <= span[1] - span[0] - rest, kind


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    class Two(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.v = torch.nn.Parameter(torch.zeros(1))

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([self.w], 1.0), torch.optim.SGD([self.v], 1.0)]

    class One(Two):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1.0)

    fit(tmp_path, callbacks=Calls(lambda run: run.save_checkpoint())).run(Two(), ones(1))
    with pytest.raises(
        ValueError, match=r"has 2 optimizer\(s\) and 0 scheduler\(s\), configure_optimizers returned 1 and 0"
    ):
        fit(tmp_path).run(One(), ones(1), resume="last")


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    paths = []
    fit(tmp_path, callbacks=Calls(lambda run: paths.extend([run.save_checkpoint(), run.save_checkpoint()]))).run(
        Weight(), ones(2)
    )
    assert [p.name for p in paths] == ["step=00000001", "step=00000001", "step=00000002", "step=00000002"]


def test_resume_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"resume=.last.: no complete checkpoint in .*dirpath=\.\.\..*give that again"
    ):
        fit(tmp_path).run(Weight(), ones(1), resume="last")
    assert fit(tmp_path).run(Weight(), ones(1), resume="auto").step == 1


def test_a_module_sees_its_run_and_its_loggers(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Sees(Weight):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            seen.extend([self.run, self.logger, self.loggers])
            return super().training_step(batch, batch_idx)

    first, second = CSVLogger(), CSVLogger(name="again.csv")
    module = Sees()
    fit(tmp_path, callbacks=[Callback(), first, second]).run(module, ones(1))
    assert isinstance(seen[0], Run)
    assert seen[1] is first
    assert seen[2] == [first, second]
    for name in ("run", "logger", "loggers"):
        assert not hasattr(module, name)
    fit(tmp_path).run(module, ones(1))
    assert seen[-2:] == [None, []]


def test_a_modules_own_names_take_precedence(tmp_path: Path) -> None:
    class Own(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.logger = "mine"
            self.run = torch.nn.Linear(1, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            assert self.logger == "mine"
            return super().training_step(batch, batch_idx) + self.run(batch).sum() * 0

    module = Own()
    fit(tmp_path, callbacks=CSVLogger()).run(module, ones(1))
    assert "run.weight" in module.state_dict()


class Broken(Weight):
    def on_validation_model_eval(self) -> None:
        raise OSError("no")


class Looks(Callback):
    evaluating: list[bool]

    def on_exception(self, run: Run, module: Any, exception: BaseException) -> None:
        self.evaluating = [run.evaluating, any(part.training for part in module.modules())]


@pytest.mark.parametrize("kind", ["run", "validate"])
def test_an_error_before_an_evaluation_ends_it(tmp_path: Path, kind: str) -> None:
    looks = Looks()
    data = (ones(2), ones(2)) if kind == "run" else (ones(2),)
    with pytest.raises(OSError, match="no"):
        getattr(fit(tmp_path, max_epochs=1, callbacks=[looks]), kind)(Broken(), *data)
    assert looks.evaluating == [False, True]


def test_settings_are_masked_when_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation that nobody logs does not pay for it: a third of its fixed cost."""
    texts = []
    hidden_in = secret_text.hidden_in
    monkeypatch.setattr(secret_text, "hidden_in", lambda text: texts.append(text) or hidden_in(text))
    fit(tmp_path).validate(Weight(), ones(2))
    assert texts == []
    fit(tmp_path, callbacks=[Reads()]).validate(Weight(), ones(2))
    assert texts != []


def test_an_evaluation_makes_few_calls(tmp_path: Path) -> None:
    """Its fixed cost is its calls: what depends on the environment alone, or on a class, is not looked up again."""
    ours, module, data = fit(tmp_path), Weight(), ones(2)
    ours.validate(module, data)
    with Profile() as profile:
        ours.validate(module, data)
    assert Stats(profile).total_calls < 2_900  # type: ignore[attr-defined]


class Reads(Callback):
    def setup(self, run: Run, module: Any, stage: str) -> None:
        assert run.config["max_epochs"] == {"value": 1, "origin": "default"}
