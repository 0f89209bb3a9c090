"""What a checkpoint costs: a blocking save, the stall of one in the background, a load, a resume deep in an epoch, and saves of small models.

``python tests/benchmarks/checkpoint.py [--megabytes 400 1200] [--rounds 5] [--dir /tmp] [--small]``. A model with AdamW's state; every round runs
each contestant once, so that a slow moment of the machine meets all of them; figures are medians, and ratios to ``torch.save`` and ``torch.load``.
Ours waits for the disk (fsync) and checks checksums; ``torch.save`` does neither, so it is shown with an fsync, too. "+MB" is the most
memory beyond what was there before; pages of a file that is mapped while it is read count.
Lightning (Fabric) and Accelerate are timed when they are installed. ``--small`` shows only the last part, in processor time: it does not change with
what else the machine does, but with the folder: ext4 takes 0.3 ms for a new file (a save makes three, with its folder) where many files were deleted
a moment ago, as in ``/tmp`` beside tests, and 0.01 ms elsewhere. Give another folder with ``--dir`` there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ModelCheckpoint
from engine import Engine, Fit, TrainModule

try:
    import lightning
    import lightning.fabric
except ImportError:
    lightning = None  # type: ignore[assignment]
try:
    import accelerate
except ImportError:
    accelerate = None  # type: ignore[assignment]

WIDTH = 1024


class Net(nn.Module):
    """Wide layers whose forward and backward passes take about as long as a copy of their state."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        count = max(1, megabytes * 10**6 // (3 * 4 * WIDTH * WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def made(megabytes: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(megabytes)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, **options)


def peak(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and the most memory in use beyond what was before (MB)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the kernel's high-water mark starts again
    before, begun = _status("VmRSS"), time.perf_counter()
    work()
    return time.perf_counter() - begun, (_status("VmHWM") - before) / 1000


def _status(name: str) -> float:
    with open("/proc/self/status") as file:
        return next(float(line.split()[1]) for line in file if line.startswith(name))


Objects = dict[str, Any]


class Ours:
    """``Engine.save_state`` and ``load_state``."""

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Objects:
        engine = Engine(accelerator="cpu")
        model, optimizer = engine.prepare(model, optimizer)
        return {"engine": engine, "model": model, "optimizer": optimizer}

    def save(self, o: Objects, place: Path) -> None:
        o["engine"].save_state(place / "ours")

    def load(self, o: Objects, place: Path) -> None:
        o["engine"].load_state(place / "ours")


class Torch:
    """``torch.save`` of two state dicts; ``torch.load`` and ``load_state_dict``."""

    sync = False

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Objects:
        return {"model": model, "optimizer": optimizer}

    def save(self, o: Objects, place: Path) -> None:
        with (place / "torch.pt").open("wb") as file:
            torch.save({name: item.state_dict() for name, item in o.items()}, file)
            if self.sync:
                file.flush()
                os.fsync(file.fileno())

    def load(self, o: Objects, place: Path) -> None:
        state = torch.load(place / "torch.pt")
        for name, item in o.items():
            item.load_state_dict(state[name])


class SyncedTorch(Torch):
    sync = True


class Fabric:
    """Lightning's, for users' own loops."""

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Objects:
        fabric = lightning.fabric.Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        return {"engine": fabric, "model": model, "optimizer": optimizer}

    def save(self, o: Objects, place: Path) -> None:
        o["engine"].save(place / "fabric.ckpt", {"model": o["model"], "optimizer": o["optimizer"]})

    def load(self, o: Objects, place: Path) -> None:
        o["engine"].load(place / "fabric.ckpt", {"model": o["model"], "optimizer": o["optimizer"]})


class Accelerate:
    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Objects:
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        return {"engine": accelerator, "model": model, "optimizer": optimizer}

    def save(self, o: Objects, place: Path) -> None:
        o["engine"].save_state(str(place / "accelerate"))

    def load(self, o: Objects, place: Path) -> None:
        o["engine"].load_state(str(place / "accelerate"))


CONTESTANTS: dict[str, Any] = {"ours": Ours(), "torch.save": Torch(), "torch.save + fsync": SyncedTorch()}
if accelerate is not None:
    CONTESTANTS["Accelerate"] = Accelerate()
if lightning is not None:
    CONTESTANTS["Lightning Fabric"] = Fabric()


def measured(name: str, kind: str, megabytes: int, place: Path) -> tuple[float, float]:
    """Seconds and extra memory (MB) of one save, or of one load into a model and an optimizer that has not stepped, in a process of its own."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        contestant = CONTESTANTS[name]
        objects = contestant.wrap(*made(megabytes))
        if kind == "save":
            step(objects["model"], objects["optimizer"], objects.get("engine"))
        os.write(send, json.dumps(peak(lambda: getattr(contestant, kind)(objects, place))).encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as file:
        took, extra = json.loads(file.read())
    os.waitpid(child, 0)
    return took, extra


def step(model: Any, optimizer: Any, engine: Any = None, rows: torch.Tensor | None = None) -> None:
    loss = model(torch.ones(64, WIDTH) if rows is None else rows).square().mean()
    loss.backward() if engine is None else engine.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def saves_and_loads(megabytes: int, rounds: int, root: Path) -> float:
    """Print the table; our blocking save (s)."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    memory: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name in CONTESTANTS:
            place = root / "new"
            place.mkdir()
            for kind in ("save", "load"):
                took, extra = measured(name, kind, megabytes, place)
                seconds[name, kind].append(took)
                memory[name, kind].append(extra)
            shutil.rmtree(place)  # nobody's time holds the removal of an earlier file
    print(
        f"\n{megabytes} MB of parameters and optimizer state, medians of {rounds} rounds, each save and load in a new process"
    )
    print(f"{'':<20}{'save s':>8}{'/torch':>8}{'+MB':>7}{'load s':>9}{'/torch':>8}{'+MB':>7}")
    for name in CONTESTANTS:
        row = f"{name:<20}"
        for kind in ("save", "load"):
            own, base = (statistics.median(seconds[each, kind]) for each in (name, "torch.save"))
            row += f"{own:>8.3f}{own / base:>8.2f}{statistics.median(memory[name, kind]):>7.0f} "
        print(row)
    return statistics.median(seconds["ours", "save"])


def stall(megabytes: int, rounds: int, root: Path, blocking: float) -> None:
    """How long a step waits for a save in the background: the call, and what is left to copy when the optimizer wants to step."""
    engine = Engine(accelerator="cpu")
    model, optimizer = engine.prepare(*made(megabytes))
    calls, holds, with_save, without = [], [], [], []
    for round_ in range(rounds + 1):
        for _ in range(2):
            begun = time.perf_counter()
            step(model, optimizer, engine)
            without.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        engine.save_state(root / "async", wait=False)
        called = time.perf_counter()
        held = 0.0
        hold = engine.checkpoint_writer.hold

        def timed(hold: Any = hold) -> None:
            nonlocal held
            start = time.perf_counter()
            hold()
            held = time.perf_counter() - start

        engine._stepper.before_next.clear()  # what save_state has added
        engine.before_step(timed)
        step(model, optimizer, engine)
        if round_:
            calls.append(called - begun)
            holds.append(held)
            with_save.append(time.perf_counter() - called)
        engine.wait_for_checkpoint()
    call, held, plain, slow = map(statistics.median, (calls, holds, without, with_save))
    share = (call + held) / blocking
    print(
        f"in the background: stall {1e3 * (call + held):.1f} ms (call {1e3 * call:.1f}, wait before the optimizer {1e3 * held:.1f}) = "
        f"{share:.1%} of our blocking save; the step meanwhile {slow:.3f} s, others {plain:.3f} s ({slow / plain:.2f}x)"
    )


def resume(rounds: int) -> None:
    """From a prepared loader to its first batch, at the start and deep in an epoch of two million samples."""
    data = TensorDataset(torch.zeros(2_000_000, 1))
    engine = Engine(accelerator="cpu", seed=1)
    times: dict[int, list[float]] = {0: [], 10**6: []}
    for _ in range(rounds + 1):
        for position, found in times.items():
            loader = engine.prepare(DataLoader(data, batch_size=32, shuffle=True))
            loader.resume(0, position)
            begun = time.perf_counter()
            next(iter(loader))
            found.append(time.perf_counter() - begun)
    first, deep = (statistics.median(found[1:]) for found in times.values())
    print(
        f"\nresume at sample 10^6: {1e3 * deep:.1f} ms to the first batch, at 0: {1e3 * first:.1f} ms; ratio {deep / first:.2f}"
    )


class Small(nn.Module):
    """Many parameters of 64 numbers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.full((64,), float(index))) for index in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.parts)).square().mean() * x.mean()


class Tiny(TrainModule):
    """One layer with AdamW: a run whose saves cost more than its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


BATCHES = 50


def fit_run(root: Path, saves: ModelCheckpoint | None) -> None:
    module, batches = Tiny(), [torch.ones(2, 8)] * BATCHES
    Fit(accelerator="cpu", devices=1, root_dir=root, callbacks=[] if saves is None else [saves]).run(module, batches)


def lightning_run(root: Path, saves: bool) -> None:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    keep = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=root, every_n_train_steps=1, save_top_k=1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[keep] if saves else [], enable_checkpointing=saves, **quiet
    )
    trainer.fit(Module(), DataLoader([torch.ones(8)] * (2 * BATCHES), batch_size=2))


def processor_ms(work: Callable[[], Any], times: int = 1) -> float:
    begun = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - begun) * 1e3 / times


def small(rounds: int, root: Path, count: int = 1000) -> None:
    """Print what a save of a tiny model costs, alone and in a run that saves after each step; and a save and a load of many small parameters."""
    rows: dict[str, list[float]] = defaultdict(list)
    contestants = {name: item for name, item in CONTESTANTS.items() if name != "torch.save + fsync"}

    def stepped(module: Callable[[], nn.Module]) -> dict[str, Objects]:
        ready = {}
        for name, contestant in contestants.items():
            model = module()
            ready[name] = contestant.wrap(model, torch.optim.AdamW(model.parameters()))
            step(**ready[name], rows=torch.ones(2, 8))
        return ready

    tiny, many = stepped(lambda: nn.Linear(8, 8)), stepped(lambda: Small(count))
    for number in range(rounds + 1):
        place = root / f"small{number}"
        place.mkdir()
        runs: dict[str, Callable[[Path], None]] = {
            "Fit, default": lambda root: fit_run(root, ModelCheckpoint(every=1)),
            "Fit, asynchronous=True": lambda root: fit_run(root, ModelCheckpoint(every=1, asynchronous=True)),
            "Fit, asynchronous=False": lambda root: fit_run(root, ModelCheckpoint(every=1, asynchronous=False)),
            "Lightning Trainer": lambda root: lightning_run(root, True),
        }
        bare = {name: lambda root: fit_run(root, None) for name in runs if name.startswith("Fit")}
        bare["Lightning Trainer"] = lambda root: lightning_run(root, False)
        for index, (name, run) in enumerate(runs.items()):
            if name.startswith("Fit") or lightning is not None:
                spent = processor_ms(partial(run, place / f"run{index}")) - processor_ms(
                    partial(bare[name], place / f"bare{index}")
                )
                rows[f"{name}: a save of a tiny model in a run (ms)"].append(spent / BATCHES)
        for name, contestant in contestants.items():
            rows[f"{name}: a save of a tiny model (ms)"].append(
                processor_ms(partial(contestant.save, tiny[name], place), 20)
            )
            for kind in ("save", "load"):
                spent = processor_ms(partial(getattr(contestant, kind), many[name], place))
                rows[f"{name}: a {kind} of {count} small parameters (us each)"].append(spent * 1e3 / count)
        shutil.rmtree(place)
    print(f"\nprocessor time, medians (and the least) of {rounds} rounds")
    for name, values in sorted(rows.items(), key=lambda row: row[0].partition(": ")[2]):
        print(f"{name:<70}{statistics.median(values[1:]):>8.2f} ({min(values[1:]):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[400, 1200])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # the peers'
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if given.small:
        with tempfile.TemporaryDirectory(dir=given.dir) as place:
            small(given.rounds, Path(place))
        return
    warm = Path(tempfile.mkdtemp())
    for contestant in CONTESTANTS.values():  # imports belong to nobody's time
        if isinstance(contestant, (Ours, Torch)):
            objects = contestant.wrap(*made(1))
            step(objects["model"], objects["optimizer"], objects.get("engine"))
            contestant.save(objects, warm)
            contestant.load(objects, warm)
    shutil.rmtree(warm)
    for megabytes in given.megabytes:
        root = Path(tempfile.mkdtemp(dir=given.dir))
        try:
            stall(megabytes, given.rounds, root, saves_and_loads(megabytes, given.rounds, root))
        finally:
            shutil.rmtree(root)
    resume(given.rounds)
    with tempfile.TemporaryDirectory(dir=given.dir) as place:
        small(given.rounds, Path(place))


if __name__ == "__main__":
    main()
