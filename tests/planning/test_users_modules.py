"""What users' modules do in a step besides computing a loss: a plan follows it, or says what it cannot follow."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from callbacks import CSVLogger
from engine import Callback, Fit, TrainModule
from engine.planning.plan import RankTrace
from engine.strategies.ddp import DDP

WIDTH, ROWS, CLASSES = 6, 8, 5


class Net(TrainModule):
    """A perceptron, 6 -> 8 -> 5."""

    net: Any

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def data(samples: int = 64) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(samples, WIDTH), torch.arange(samples) % CLASSES), batch_size=ROWS)


def planned(module: TrainModule, world_size: int = 1, strategy: str | DDP = "single", **settings: Any) -> RankTrace:
    fit = Fit(**{"max_steps": 2, "strategy": strategy, **settings})
    return fit.plan(module, data(), world_size=world_size, device="cpu").traces[0]


def with_step(step: Callable[[Any, Any], Any]) -> TrainModule:
    """The perceptron with a ``training_step`` that is called with the module and the batch."""

    class Stepping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return step(self, batch)

    return Stepping()


# -- values that are not there ----------------------------------------------------------------------------------------------------


def test_checks_of_a_loss_pass() -> None:
    def step(module: Any, batch: Any) -> Tensor:
        loss = F.cross_entropy(module.net(batch[0]), batch[1])
        if not torch.isfinite(loss).all() or torch.isnan(loss).any() or loss.isinf() or not loss < 10:
            raise RuntimeError("this loss is not finite")
        return loss

    trace = planned(with_step(step))
    assert trace.flops == planned(Net()).flops
    assert trace.missing
    assert not any("the plan ends" in line for line in trace.missing)


def test_conditions_agree_with_numbers() -> None:
    """A loss is 1, whether it is read or compared."""
    seen = []

    def step(module: Any, batch: Any) -> Tensor:
        loss = F.cross_entropy(module.net(batch[0]), batch[1])
        seen.append((loss.item(), bool(loss < 3), bool(loss > 3), bool((loss == 1).logical_not())))
        return loss

    planned(with_step(step))
    assert set(seen) == {(1.0, True, False, False)}


def test_every_expert_gets_rows() -> None:
    class Experts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            chosen = self.experts[0](x).argmax(-1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                mask = chosen == index
                if mask.any():
                    out[mask] = expert(x[mask])
            return F.cross_entropy(self.net(out), y)

    trace = planned(Experts(), 2, "ddp")
    products = sum(each.count for each in trace.operations if each.name == "aten.addmm" and each.phase == "forward")
    assert products == 1 + 3 + 2
    assert not any("the plan ends" in line for line in trace.missing)


def test_distributions_check_nothing_that_is_not_there() -> None:
    def step(module: Any, batch: Any) -> Tensor:
        out = module.net(batch[0])
        drawn = Normal(out[:, :2], out[:, 2:4].exp()).rsample()
        return drawn.square().mean() + F.cross_entropy(out, Categorical(probs=out.softmax(-1)).sample())

    assert planned(with_step(step)).missing == ()


def test_small_integers_of_buffers_keep_their_values() -> None:
    class Queue(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(3 * ROWS, CLASSES))
            self.register_buffer("place", torch.tensor([ROWS]))
            self.register_buffer("positions", torch.arange(100, 100 + WIDTH), persistent=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert self.positions.tolist() == list(range(100, 100 + WIDTH))
            out, start = self.net(batch[0]), int(self.place)
            self.queue[start : start + ROWS] = out.detach()
            self.place[0] = (start + ROWS) % (3 * ROWS)
            return F.cross_entropy(out, batch[1])

    assert planned(Queue(), 2, "ddp").missing == ()


def test_shapes_that_depend_on_values() -> None:
    def step(module: Any, batch: Any) -> Tensor:
        x, y = batch
        out = module.net(x)
        scores = out[:, None].expand(-1, 12, -1).transpose(0, 1).log_softmax(-1)
        lengths, targets = torch.full((ROWS,), 12), torch.ones(ROWS, 3, dtype=torch.long)
        temporal = F.ctc_loss(scores, targets, lengths, torch.full((ROWS,), 3))
        repeated = out.repeat_interleave(out.argmax(-1) + 1, 0)
        counts = torch.bincount(out.argmax(-1), minlength=CLASSES)
        assert repeated.shape == out.shape
        assert counts.shape == (CLASSES,)
        assert torch.unique(out.argmax(-1)).shape == (ROWS,)
        return temporal + repeated.mean() + F.cross_entropy(out, y)

    found = planned(with_step(step)).missing
    assert not any("the plan ends" in line for line in found)
    assert not any("bincount" in line for line in found)  # as long as the code says
    assert any("repeat_interleave" in line and line.endswith("shape [8]") for line in found)


def test_recurrent_layers() -> None:
    hidden, steps = 10, 7

    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru = nn.LSTM(WIDTH, hidden), nn.GRU(hidden, CLASSES, batch_first=True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            out, _ = self.lstm(x[None].expand(steps, -1, -1))
            packed = nn.utils.rnn.pack_padded_sequence(
                out.transpose(0, 1), y + 1, batch_first=True, enforce_sorted=False
            )
            assert len(packed.data) == int((y + 1).sum())
            _, last = self.gru(packed)
            return F.cross_entropy(last[0], y)

    module = Recurrent()
    module.net.requires_grad_(False)
    trace = planned(module)
    assert trace.missing == ()
    of_lstm = sum(each.flops * each.count for each in trace.operations if "rnn_layer" in each.name)
    # Four gates, from the input and from the state before; twice as much in the backward pass.
    assert of_lstm == 3 * 2 * steps * ROWS * 4 * hidden * (WIDTH + hidden)


def test_products_of_groups_in_float32() -> None:
    class Grouped(Net):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.ones(2, WIDTH, 8))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = F.grouped_mm(batch[0], self.experts, offs=torch.tensor([3, ROWS], dtype=torch.int32))
            assert out.shape == (ROWS, 8)
            return self.net[2](out).square().mean() + 0 * self.net[0].weight.sum() + 0 * self.net[0].bias.sum()

    trace = planned(Grouped())
    grouped = [each for each in trace.operations if each.name == "aten._grouped_mm" and each.phase == "forward"]
    assert [each.flops for each in grouped] == [2 * ROWS * WIDTH * 8]


def test_a_script_module_is_refused() -> None:
    module = Net()
    with warnings.catch_warnings(action="ignore"):
        module.net.append(torch.jit.script(nn.Linear(CLASSES, CLASSES)))
    with pytest.raises(ValueError, match=r"Net\.net\.3 is a ScriptModule \(Linear\)"):
        planned(module)


# -- no effect outside ------------------------------------------------------------------------------------------------------------


class Writes(Callback):
    """Appends to a file in a folder that it makes, with a lock, which cannot be copied."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, threading.Lock()
        self.losses: list[float] = []

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "losses.txt").open("a").close()
            with open(self.folder / "last.txt", "w") as file:
                file.write(f"{float(outputs.detach()):.3f}")
            torch.save(module.state_dict(), self.folder / "weights.pt")
            self.losses.append(float(outputs.detach()))


class Logs(Net):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def configure_callbacks(self) -> Any:
        return CSVLogger(self.folder / "own")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        assert self.logger is not None
        self.logger.experiment.add_scalar("loss", loss, batch_idx)
        Path(self.logger.save_dir, "figure").write_text("figure")
        return loss


class Locked(DDP):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_strategy_may_hold_a_lock() -> None:
    assert planned(Net(), 2, Locked()).missing == ()


def test_loggers_write_nothing_and_callbacks_are_copies(tmp_path: Path) -> None:
    given = Writes(tmp_path / "given")
    planned(Logs(tmp_path), callbacks=[given, CSVLogger(tmp_path / "logged")], root_dir=tmp_path / "root")
    assert [path.name for path in tmp_path.iterdir()] == ["given"]  # a callback writes to its own paths as in a run
    assert sorted(path.name for path in given.folder.iterdir()) == ["last.txt", "losses.txt", "weights.pt"]
    assert given.losses == []


def test_files_that_exist_keep_what_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))  # below it all may be written
    for name in ("rewritten.txt", "appended.txt", "descriptor.txt"):
        (tmp_path / name).write_text("as before")

    def step(module: Any, batch: Any) -> Tensor:
        (tmp_path / "rewritten.txt").write_text("new")
        with open(tmp_path / "appended.txt", "a") as file:
            file.write("more")
        with open(tmp_path / "made.txt", "a") as file:
            file.write("step ")
        with os.fdopen(os.open(tmp_path / "descriptor.txt", os.O_WRONLY | os.O_TRUNC), "w") as file:
            file.write("new")
        return module.net(batch[0]).square().mean()

    planned(with_step(step))
    texts = {path.name: path.read_text() for path in tmp_path.glob("*.txt")}
    kept = dict.fromkeys(("rewritten.txt", "appended.txt", "descriptor.txt"), "as before")
    assert texts == {**kept, "made.txt": texts["made.txt"]}
    assert texts["made.txt"].startswith("step step ")
    (tmp_path / "rewritten.txt").write_text("after the plan")
    assert (tmp_path / "rewritten.txt").read_text() == "after the plan"


def test_temporary_folders_and_the_runs_folder_are_there_and_go(tmp_path: Path) -> None:
    folders: list[Path] = []

    class Notes(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.run is not None
            folders.append(self.run.folder)
            (self.run.folder / "note.txt").write_text("note")
            with tempfile.TemporaryDirectory() as temporary:
                Path(temporary, "scratch").mkdir()
                Path(temporary, "scratch", "loss.txt").write_text("loss")
                os.rename(Path(temporary, "scratch", "loss.txt"), Path(temporary, "loss.txt"))
                assert Path(temporary, "loss.txt").read_text() == "loss"
            return super().training_step(batch, batch_idx)

    trace = planned(Notes(), root_dir=tmp_path / "root")
    assert trace.missing == ()
    assert len(set(folders)) == 1
    assert not folders[0].exists()
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_a_plan_at_once() -> None:
    steps: list[int] = []

    class Interrupted(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            steps.append(1)
            signal.raise_signal(signal.SIGINT)
            steps.append(2)

    with pytest.raises(KeyboardInterrupt) as caught:
        planned(Interrupted(), 2, "ddp")
    assert (steps, str(caught.value)) == ([1], "")


def test_sigterm_ends_a_plan_as_any_program() -> None:
    handlers: set[Any] = set()

    class Asks(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            handlers.add(signal.getsignal(signal.SIGTERM))

    planned(Asks(), 2, "ddp")
    assert handlers == {signal.SIG_DFL}


def test_objects_of_all_ranks_are_those_of_this_one() -> None:
    def step(module: Any, batch: Any) -> Tensor:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, {"rank": dist.get_rank()})
        dist.broadcast_object_list(sent := ["a"])
        assert (found, sent) == ([{"rank": 0}] * 4, ["a"])
        return F.cross_entropy(module.net(batch[0]), batch[1])

    assert planned(with_step(step), 4, "ddp").missing == ()


# -- the step ---------------------------------------------------------------------------------------------------------------------


def test_a_long_window_is_not_longer_to_plan() -> None:
    calls = []

    def step(module: Any, batch: Any) -> Tensor:
        calls.append(batch)
        return F.cross_entropy(module.net(batch[0]), batch[1])

    one, many = planned(Net()), planned(with_step(step), accumulate_grad_batches=500)
    assert (many.micro_batches, many.samples) == (500, 500 * ROWS)
    assert many.flops == 500 * one.flops
    assert len(calls) <= 12


def test_a_module_that_steps_every_third_batch() -> None:
    class Third(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]) / 3)
            if (batch_idx + 1) % 3 == 0:
                self.optimizers().step()
                self.optimizers().zero_grad()

    trace = planned(Third())
    assert (trace.micro_batches, trace.flops) == (3, 3 * planned(Net()).flops)
    assert trace.timeline[0].memory.optimizer_state == 2 * 101 * 4 + 4 * 4
    assert trace.missing == ()


@pytest.mark.parametrize(("size", "lines"), [(ROWS, 0), (2 * ROWS, 1)])
def test_a_validation_that_may_need_more_is_named(size: int, lines: int) -> None:
    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

        def val_dataloader(self) -> Any:
            return [data(), DataLoader(data().dataset, batch_size=size)]

    found = planned(Validated()).missing
    assert [line for line in found if "validation is not traced: its batches have 16 samples" in line] == list(found)
    assert len(found) == lines


def test_what_a_user_compiles_is_planned_eagerly() -> None:
    module = Net()
    module.net.compile(backend="eager")
    trace = planned(module)
    assert trace.operations == planned(Net()).operations
    assert "torch.compile is left out" in trace.missing[0]


def test_setup_knows_the_number_of_steps() -> None:
    class Asks(Net):
        def setup(self, stage: str) -> None:
            assert self.trainer.estimated_stepping_batches == 4

    assert planned(Asks(), 2, "ddp", max_steps=None, max_epochs=1).missing == ()


def test_modules_of_the_backward_pass() -> None:
    """An operation between two modules is of the one around them, in both passes."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(F.gelu(self.up(x)))
            return out

    class Blocks(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = Block()

    passes = {"forward": ["net.up", "net", "net.down", ""], "backward": ["", "net.down", "net", "net.up"]}
    moments = planned(Blocks()).timeline
    for phase, expected in passes.items():
        modules = [moment.module for moment in moments if moment.phase == phase]
        assert [name for name, before in zip(modules, [None, *modules], strict=False) if name != before] == expected
    assert {moment.module for moment in moments if moment.phase == "optimizer step"} == {""}
