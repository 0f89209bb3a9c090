"""A replayed step is the recorded one: its samples, its losses to the last bit, its gradients, and where its numbers stop being finite."""

from __future__ import annotations

import math
import os
import signal
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import run_ranks
from support.toys import fit
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from callbacks import JSONLLogger, ModelCheckpoint
from engine import Callback, Fit, Loss, Resume, Run, TrainModule


class Net(TrainModule):
    """Dropout and a loss over unequal counts: what a replay must repeat exactly."""

    def __init__(self, poison: int = -1, dropout: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1))
        self.poison = poison

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, index = batch
        error = self.layers(x).square()
        if self.poison in index.tolist():
            error = error / 0.0
        loss = Loss(error.sum(), index.float().sum() + 1)
        self.log("loss", loss.sum.detach() / loss.count)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def data(size: int = 24) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(size, 4, generator=generator), torch.arange(size)), 3, shuffle=True)


class Seen(Callback):
    """What each step saw, in the run itself."""

    critical = False  # it only watches: a replay leaves it out

    def __init__(self) -> None:
        self.samples: dict[int, list[int]] = {}
        self.losses: dict[int, list[float]] = {}

    def on_before_backward(self, run: Run, module: nn.Module, loss: Any) -> None:
        self.losses.setdefault(run.step + 1, []).append(float(loss.sum.detach() / loss.count))

    def on_train_batch_start(self, run: Run, module: nn.Module, batch: Any, batch_idx: int) -> None:
        self.samples.setdefault(run.step + 1, []).extend(batch[1].tolist())


def trained(root: Path | str, seen: Seen, module: Net | None = None, **settings: Any) -> Fit:
    every = ModelCheckpoint(every=3, save_top_k=-1, asynchronous=False)
    made = fit(root, **{"max_epochs": 2, "seed": 7, "callbacks": [seen, every, JSONLLogger()], **settings})
    made.run(module or Net(), data())
    return made


@pytest.mark.parametrize("window", [1, 2])
def test_a_step_is_the_recorded_one(tmp_path: Path, window: int) -> None:
    seen = Seen()
    made = trained(tmp_path, seen, accumulate_grad_batches=window)
    before = sorted(path for path in tmp_path.rglob("*"))
    for step in (4, 6, 7):
        found = made.replay(Net(), data(), run=tmp_path, step=step)
        assert found.losses == [seen.losses[step]]
        assert found.samples == seen.samples[step]
        assert (found.step, found.epoch, found.nonfinite) == (step, (step - 1) // (8 // window), None)
        assert found.checkpoint.endswith(f"step=0000000{(step - 1) // 3 * 3}")
        assert found.metrics["loss"] == pytest.approx(sum(found.losses[0]) / window)
        assert f"step {step} " in str(found)
        assert "layers.2.bias" not in str(found)
        assert "layers.2.bias" in found.text(per_layer=True)
        assert found.grad_norm == pytest.approx(sum(norm**2 for norm in found.grad_norms.values()) ** 0.5)
    assert sorted(path for path in tmp_path.rglob("*") if "replay" not in path.parts) == before


class Asks(Seen):
    """Asks to stop after the third step."""

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if run.step == 3:
            run.stop("enough")


def test_a_stop_that_waits_does_not_end_a_replay(tmp_path: Path) -> None:
    seen = Asks()
    made = trained(tmp_path, seen, min_steps=5)
    assert made.replay(Net(), data(), run=tmp_path, step=5).losses == [seen.losses[5]]


def by_sampler(kind: str) -> Any:
    dataset, generator = data().dataset, torch.Generator().manual_seed(5)
    sampler = WeightedRandomSampler([1.0 + index for index in range(24)], 24, generator=generator)
    if kind == "weighted":
        return DataLoader(dataset, 3, sampler=sampler)
    if kind == "batches":
        return DataLoader(dataset, batch_sampler=CustomBatches(sampler, 3, drop_last=False))
    return [DataLoader(dataset, 3)] if kind == "several" else DataLoader(Rows(dataset), 3)


class CustomBatches(BatchSampler):
    """A class of the user's: its batches are kept."""


class Rows(IterableDataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset[index] for index in range(24))


class First(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0] if len(batch) == 1 else batch, batch_idx)


class SeenFirst(Seen):
    def on_train_batch_start(self, run: Run, module: nn.Module, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(run, module, batch[0] if len(batch) == 1 else batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("weighted", ""), ("batches", ""), ("stream", "a stream: not known"), ("several", "several loaders: not known")],
)
def test_a_users_samplers_samples_are_named(tmp_path: Path, kind: str, text: str) -> None:
    seen = SeenFirst()
    every = ModelCheckpoint(every=3, save_top_k=-1, asynchronous=False)
    made = fit(tmp_path, max_epochs=2, seed=7, callbacks=[seen, every])
    made.run(First(), by_sampler(kind))
    for step in (5, 12):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "this data cannot be read from the middle")
            found = made.replay(First(), by_sampler(kind), run=tmp_path, step=step)
        assert found.losses == [seen.losses[step]]
        assert found.samples == (None if text else seen.samples[step])
        assert f"samples: {text or ', '.join(map(str, seen.samples[step]))}\n" in str(found)


def test_gradients_are_those_of_a_bare_step(tmp_path: Path) -> None:
    seen = Seen()
    made = trained(tmp_path, seen)
    found = made.replay(Net(), data(), run=tmp_path / "checkpoints" / "step=00000003", step=4)
    net = Net.load_from_checkpoint(tmp_path / "checkpoints" / "step=00000003")
    images, numbers = next(iter(DataLoader(data().dataset, 3, sampler=found.samples)))
    assert numbers.tolist() == found.samples
    torch.set_rng_state(made_state(tmp_path / "checkpoints" / "step=00000003"))
    (net.layers(images).square().sum() / (numbers.float().sum() + 1)).backward()
    expected = {name: float(p.grad.norm()) for name, p in net.named_parameters() if p.grad is not None}
    assert found.grad_norms == pytest.approx(expected, rel=1e-6)


def made_state(checkpoint: Path) -> Tensor:
    """torch's generator in a checkpoint: a plain file of tensors."""
    found = load_file(checkpoint / "rank=00000.safetensors")
    return next(value for name, value in found.items() if name.endswith("rng.torch"))


def test_the_first_number_that_is_not_finite_is_named(tmp_path: Path) -> None:
    seen = Seen()
    made = trained(tmp_path, seen)
    bad = seen.samples[5][0]
    found = made.replay(Net(bad), data(), run=tmp_path, step=5)
    assert found.nonfinite == "the loss of micro-batch 0"

    class Breaks(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].register_forward_hook(lambda module, inputs, output: output / 0.0)

    found = made.replay(Breaks(), data(), run=tmp_path, step=4)
    assert found.nonfinite == "the output of layers.2 (Linear) in micro-batch 0"
    broken = Breaks()
    with pytest.raises(RuntimeError, match="nan"):
        made.replay(broken, data(), run=tmp_path, step=4, detect_anomaly=True)
    assert not torch.is_anomaly_enabled()
    assert not broken._forward_hooks
    assert not any(layer._forward_hooks for layer in broken.layers[:2])


def test_what_cannot_be_replayed_is_said(tmp_path: Path) -> None:
    made = trained(tmp_path, Seen())
    for step in (0, True, "3"):
        with pytest.raises(ValueError, match="numbered from 1"):
            made.replay(Net(), data(), run=tmp_path, step=step)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"step=00000003 is not from before step 2: give the run's folder"):
        made.replay(Net(), data(), run=tmp_path / "checkpoints" / "step=00000003", step=2)
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist or is empty. .* seed"):
        made.replay(Net(), data(), run=tmp_path / "nowhere", step=2)
    with pytest.raises(ValueError, match="the run ends at step 16: max_epochs=2 was reached before"):
        made.replay(Net(), data(), run=tmp_path, step=17)


@pytest.mark.parametrize("run", ["folder", "none"])
def test_a_step_before_the_first_checkpoint_is_repeated_from_the_seed(tmp_path: Path, run: str) -> None:
    seen = Seen()
    made = trained(tmp_path, seen, accumulate_grad_batches=2, gradient_clip_val=0.5)
    for step in (1, 3):
        found = made.replay(Net(), data(), run=tmp_path if run == "folder" else None, step=step)
        assert found.losses == [seen.losses[step]]
        assert found.samples == seen.samples[step]
        assert (found.checkpoint, found.ranks, found.recorded_ranks) == ("", 1, 1)
        assert f"step {step} (epoch 0) from the start, 1 rank(s)" in str(found)


@pytest.mark.parametrize("reaction", [None, "raise", "skip"])
@pytest.mark.parametrize("logs", [True, False])
def test_a_nan_in_the_first_epoch_of_a_run_without_checkpoints(
    tmp_path: Path, reaction: str | None, logs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()
    settings = {"max_epochs": 1, "seed": 7, "on_nonfinite": reaction, "accumulate_grad_batches": 2}
    made = fit(tmp_path, **settings, callbacks=[seen, *([JSONLLogger()] if logs else [])])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if reaction == "raise":
            with pytest.raises(FloatingPointError):
                made.run(Net(poison=5), data())
        else:
            made.run(Net(poison=5), data())
        step = next(step for step, samples in seen.samples.items() if 5 in samples)
        assert (tmp_path / "run.json").exists() is logs
        caplog.clear()
        found = made.replay(Net(poison=5), data(), run=tmp_path if logs else None, step=step)
    micro_batch = next(index for index, loss in enumerate(found.losses[0]) if not math.isfinite(loss))
    assert found.nonfinite == f"the loss of micro-batch {micro_batch}"
    assert 5 in found.samples[3 * micro_batch : 3 * micro_batch + 3]  # type: ignore[index]
    assert found.samples == seen.samples[step][:6]
    assert not [record.message for record in caplog.records if "NaN or infinite" in record.message]
    assert list(map(repr, found.losses[0])) == list(map(repr, seen.losses[step]))


def test_a_start_that_cannot_be_repeated_is_an_error(tmp_path: Path) -> None:
    made, used = trained(tmp_path, Seen()), Net()
    with pytest.raises(ValueError, match=r"step=2\).* the run had seed=7, not None"):
        fit(tmp_path, max_epochs=2).replay(Net(), data(), run=tmp_path, step=2)
    with pytest.raises(ValueError, match=r"without a seed .*: give the seed that the run had, train with Fit"):
        fit(tmp_path, max_epochs=2).replay(Net(), data(), step=2)
    with pytest.raises(ValueError, match="the run had seed=7, not 8"):
        fit(tmp_path, max_epochs=2, seed=8).replay(Net(), data(), run=tmp_path, step=2)
    unseeded = trained(tmp_path / "unseeded", Seen(), used, seed=None)
    with pytest.raises(ValueError, match="without a seed its start cannot be repeated: train with"):
        made.replay(Net(), data(), run=unseeded.settings.root_dir, step=2)
    with pytest.raises(ValueError, match=r"this Net was trained for 16 step\(s\): give a new one"):
        made.replay(used, data(), run=tmp_path, step=2)


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_run_that_began_with_a_checkpoint_does_not_start_at_its_seed(
    tmp_path: Path, weights_only: bool, saves: bool
) -> None:
    seen = Seen()
    trained(tmp_path / "first", Seen())
    path = tmp_path / "first" / "checkpoints" / "step=00000006"
    every = ModelCheckpoint(every=3, save_top_k=-1, asynchronous=False)
    second = fit(
        tmp_path / "second", max_epochs=2, seed=7, callbacks=[seen, JSONLLogger(), *([every] if saves else [])]
    )
    second.run(Net(), data(), resume=Resume(path, weights_only=weights_only))
    step = 2 if weights_only else 8
    with pytest.raises(ValueError, match=r"the run began with .*step=00000006\. If it resumed from there, give run="):
        second.replay(Net(), data(), run=tmp_path / "second", step=step)
    if weights_only:
        found = second.replay(Net.load_from_checkpoint(path), data(), step=step)
    else:
        found = second.replay(Net(), data(), run=path, step=step)
    assert found.losses == [seen.losses[step]]
    assert found.samples == seen.samples[step]


class Manual(Net):
    """Steps of its own: ``steps(batch_idx)`` of a batch."""

    automatic_optimization = False

    def steps(self, batch_idx: int) -> int:
        return 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for _ in range(self.steps(batch_idx)):
            loss = self.layers(batch[0]).square().mean()
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()


class Sometimes(Manual):
    """Its third batch has two steps, the others have one."""

    def steps(self, batch_idx: int) -> int:
        return 2 if batch_idx == 2 else 1


class SeenPasses(Seen):
    def on_before_backward(self, run: Run, module: nn.Module, loss: Any) -> None:
        self.losses.setdefault(run.step + 1, []).append(float(loss.detach()))


def test_a_batch_with_several_steps_is_observed_whole(tmp_path: Path) -> None:
    seen = SeenPasses()
    made = fit(tmp_path, max_epochs=1, seed=7, callbacks=[seen])
    made.run(Manual(), data())
    for step in (1, 2, 5, 6, 16):
        first = step - (step - 1) % 2
        found = made.replay(Manual(), data(), step=step)
        assert found.losses == [[*seen.losses[first], *seen.losses[first + 1]]]
        assert found.samples == seen.samples[first]
    assert made.run(Sometimes(), data()).step == 9
    with pytest.raises(ValueError, match=r"replay\(step=4\): .* replay\(step=3\) observes the whole batch"):
        made.replay(Sometimes(), data(), step=4)
    assert len(made.replay(Sometimes(), data(), step=3).losses[0]) == 2
    assert len(made.replay(Sometimes(), data(), step=5).losses[0]) == 1


class Killed(Callback):
    """Kills its rank without a warning after a step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if run.step == self.at and run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def job(root: str, what: str) -> Any:
    """One start of the job: ``killed`` after step 5, ``resumed``, or ``replayed``."""
    seen = Seen()
    every = ModelCheckpoint(every=3, save_top_k=-1, asynchronous=False)
    killed = [Killed(5)] if what == "killed" else []
    made = Fit(max_epochs=2, seed=7, root_dir=root, num_sanity_val_steps=0, callbacks=[seen, every, *killed])
    if what == "replayed":
        return [asdict(made.replay(Net(), data(), run=root, step=step)) for step in (4, 6, 7)]
    made.run(Net(), data(), resume="last" if what == "resumed" else None)
    even = Seen()
    if what == "resumed":
        trained(f"{root}/even", even, Net(dropout=0.0), devices="auto")
    return [seen.losses, seen.samples, even.losses]


def job_on_two(root: Path, what: str, check: bool = True) -> list[Any]:
    folders = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    script = f"import sys; sys.path[:0] = {folders!r}\nimport test_replay as tests\nreport(tests.job(*sys.argv[1:]))"
    return [ran.value for ran in run_ranks(script, 2, root, what, check=check)]


@pytest.mark.slow
def test_steps_of_a_killed_and_resumed_run_of_two_ranks(tmp_path: Path) -> None:
    job_on_two(tmp_path, "killed", check=False)
    recorded = job_on_two(tmp_path, "resumed")  # from step 3
    steps = {step: [losses[str(step)] for losses, _, _ in recorded] for step in (4, 6, 7)}
    everywhere = job_on_two(tmp_path, "replayed")
    assert everywhere[0] == everywhere[1]
    alone = fit(tmp_path, max_epochs=2, seed=7)
    for step, found in zip((4, 6, 7), everywhere[0], strict=True):
        assert found["losses"] == steps[step]
        assert (found["ranks"], found["recorded_ranks"]) == (2, 2)
        sampled = [samples[str(step)] for _, samples, _ in recorded]
        assert sorted(found["samples"]) == sorted([*sampled[0], *sampled[1]])
        single = alone.replay(Net(dropout=0.0), data(), run=tmp_path / "even", step=step)
        assert single.samples == found["samples"]
        assert (single.ranks, single.recorded_ranks) == (1, 2)
        by_rank = [losses[str(step)] for _, _, losses in recorded]
        assert single.losses == [pytest.approx([by_rank[0][0], by_rank[1][0]], rel=1e-6)]
    first = alone.replay(Net(dropout=0.0), data(), run=tmp_path / "even", step=2)  # before the first checkpoint
    assert (first.checkpoint, first.ranks, first.recorded_ranks) == ("", 1, 2)
    assert first.losses == [pytest.approx([even["2"][0] for _, _, even in recorded], rel=1e-6)]


class Wrapping(Callback):
    """Wraps the hooks of a replayed step while it runs, as a profiler does."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def _wrapped(self, name: str, hook: Any) -> Any:
        self.names.append(name)
        return hook

    def on_before_backward(self, run: Run, module: nn.Module, loss: Any) -> None:
        if not self.names:
            run.hooks.wrap(self._wrapped)


def test_hooks_can_be_wrapped_while_a_step_is_replayed(tmp_path: Path) -> None:
    made = trained(tmp_path, Seen())
    wrapping = Wrapping()
    again = fit(tmp_path, max_epochs=2, seed=7, callbacks=[wrapping])
    again.replay(Net(), data(), run=tmp_path, step=4)
    assert "[Callback]StepWatch.on_before_optimizer_step" in wrapping.names
    assert made.replay(Net(), data(), run=tmp_path, step=4).recorded is None


def test_callbacks_that_a_replay_leaves_out_cause_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = trained(tmp_path, Seen())
    caplog.clear()
    made.replay(Net(), data(), run=tmp_path, step=4)
    assert not [record.message for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("saves", ["checkpoints", "a log", "nothing", "no seed"])
def test_the_error_of_a_nan_names_the_step_and_what_repeats_it(tmp_path: Path, saves: str, window: int) -> None:
    callbacks = {"checkpoints": [ModelCheckpoint(every="1 steps")], "a log": [JSONLLogger()]}.get(saves, [])
    seed = None if saves == "no seed" else 7
    made = fit(tmp_path, seed=seed, on_nonfinite="raise", accumulate_grad_batches=window, callbacks=callbacks)
    seen = Seen()
    with pytest.raises(FloatingPointError) as raised:
        fit(tmp_path / "samples", seed=seed, on_nonfinite="raise", callbacks=seen).run(Net(poison=5), data())
    micro_batch = next(step for step, samples in seen.samples.items() if 5 in samples) - 1
    assert f"in step {micro_batch + 1} (epoch 0, micro-batch {micro_batch}); first in: " in str(raised.value)
    with pytest.raises(FloatingPointError) as raised:
        made.run(Net(poison=5), data())
    text = str(raised.value)
    if seed is None:  # another order of the samples
        assert text.endswith(
            "neither a checkpoint from before it nor a seed: train with Fit(seed=), or save with ModelCheckpoint(every=...)"
        )
        return
    step, first = micro_batch // window + 1, micro_batch // window * window
    places = {1: f"micro-batch {micro_batch}", 3: f"micro-batches {first} to {min(first + 2, 7)}"}
    assert text.startswith(
        f"a gradient is not finite (on_nonfinite='raise') in step {step} (epoch 0, {places[window]})"
    )
    wrote = saves == "a log" or (saves == "checkpoints" and step > 1)
    run = str(tmp_path) if wrote else None
    call = f"Fit.replay(module, loader, {'' if run is None else f'run={run!r}, '}step={step})"
    assert call in text
    assert (f"fit replay {tmp_path} --step {step} --target" in text) is (run is not None)
    assert made.replay(Net(poison=5), data(), run=run, step=step).nonfinite is not None
