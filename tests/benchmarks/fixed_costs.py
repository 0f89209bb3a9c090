"""What people wait for besides steps: collections, removals, copies in memory, small files, commands, records, starts, evaluations.

    python tests/benchmarks/fixed_costs.py [PART ...] [--rounds 5]
    python tests/benchmarks/fixed_costs.py --smallest  # every part runs, in half a minute; the numbers mean nothing

Public interfaces, and that of stored checkpoints, are used, so that the same file measures earlier versions (``PYTHONPATH=<their checkout>``).
Lightning and Accelerate are measured beside where they are installed. Processor time unless a row says *wall*; medians (and the least) over the
rounds, in each of which everything that is compared runs once.
"""

from __future__ import annotations

import argparse
import logging
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from callbacks import ModelCheckpoint, PredictionWriter, Report
from engine import Callback, Fit, TrainModule
from engine.checkpoint.storage_paths import storage_of

STEPS = 60  # one collection
Row = tuple[str, float, str]


class Net(TrainModule):
    """One layer of ``width``."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layer(batch).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def batches(count: int, width: int = 4) -> list[torch.Tensor]:
    return [torch.ones(2, width)] * count


def fit(**settings: Any) -> Fit:
    return Fit(accelerator="cpu", devices=1, num_sanity_val_steps=0, root_dir=tempfile.mkdtemp(), **settings)


class Rounds:
    warm_ups = 1
    """Rounds that come first and do not count; ``--smallest`` has none."""


def seconds(
    calls: Sequence[Callable[[], object]], rounds: int, times: int = 1, clock: Callable[[], float] = time.process_time
) -> list[list[float]]:
    """For each round, after those that do not count, the seconds of each call, which is repeated ``times`` times."""
    rows = []
    for _ in range(Rounds.warm_ups + rounds):
        row = []
        for call in calls:
            began = clock()
            for _ in range(times):
                call()
            row.append((clock() - began) / times)
        rows.append(row)
    return rows[Rounds.warm_ups :]


def difference(one: Callable[[], object], other: Callable[[], object], rounds: int) -> float:
    """The median of how many seconds more ``one`` takes than ``other``, in the same round."""
    return median(row[0] - row[1] for row in seconds([one, other], rounds))


def median_and_least(name: str, values: Sequence[float], unit: str) -> Iterator[Row]:
    yield name, median(values), unit
    yield f"{name}, least", min(values), unit


def collection(rounds: int) -> Iterator[Row]:
    def train(every: int) -> None:
        fit(gc_every_n_steps=every).run(Net(), batches(STEPS))

    yield (
        f"the garbage collection of a run of {STEPS} steps",
        difference(lambda: train(50), lambda: train(0), rounds) * 1e3,
        "ms",
    )


def removal(rounds: int, most: int = 1000) -> Iterator[Row]:
    done = fit(callbacks=[ModelCheckpoint()]).run(Net(), batches(4))
    for kept in [number for number in (10, 50, 300, 1000) if number <= most]:
        with tempfile.TemporaryDirectory() as folder:
            place, names = storage_of(folder), [f"step={number:08d}" for number in range(kept + 5 * rounds + 1)]
            for name in names:
                shutil.copytree(str(done.last_checkpoint), Path(folder) / name)
            place.begin("new").seal(1, {}, {})
            times = [row[0] * 1e3 for row in seconds([partial(_remove_next, place, iter(names))], 5 * rounds)]
        yield from median_and_least(f"a removal with {kept} kept", times, "ms")


def _remove_next(place: Any, names: Iterator[str]) -> None:
    place.remove(next(names))


PEAK = """
import sys; sys.path.insert(0, {here!r})
import resource, torch, fixed_costs as f
from callbacks import ModelCheckpoint
kind, width = sys.argv[1], int(sys.argv[2])
net = f.Net(width)
if kind == "bare":
    optimizer = net.configure_optimizers()
    for batch in f.batches(6, width):
        net.layer(batch).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
else:
    f.fit(callbacks=[ModelCheckpoint(every="2 steps", asynchronous=kind == "asynchronous")]).run(net, f.batches(6, width))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def memory(rounds: int, width: int = 3000) -> Iterator[Row]:
    for kind in ("bare", "synchronous", "asynchronous"):
        code = PEAK.format(here=str(Path(__file__).parent))
        yield (
            f"peak memory of {width * width / 1e6:g} M parameters, saves {kind}",
            float(output(sys.executable, "-c", code, kind, str(width)).split()[-1]),
            "MB",
        )


def hook_seconds(callback: Callback, *names: str) -> list[float]:
    """The processor seconds of each later call of these hooks: less than a training or prediction varies by."""
    spent: list[float] = []

    def timed(hook: Callable[..., None], *args: Any) -> None:
        began = time.process_time()
        hook(*args)
        spent.append(time.process_time() - began)

    for name in names:
        setattr(callback, name, partial(timed, getattr(callback, name)))
    return spent


def predictions(rounds: int, count: int = 1000) -> Iterator[Row]:
    data = batches(count)
    for interval in ("auto", "batch"):
        means = []
        for _ in range(Rounds.warm_ups + rounds):
            writer = PredictionWriter(write_interval=interval)
            spent = hook_seconds(writer, "on_predict_batch_end", "on_predict_end")
            fit(callbacks=[writer]).predict(Net(), data, return_predictions=False)
            means.append(sum(spent) / len(data) * 1e6)
        yield from median_and_least(
            f"PredictionWriter(write_interval={interval!r}), a batch", means[Rounds.warm_ups :], "us"
        )


def children() -> float:
    """The processor seconds of the processes that this one has started and waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def commands(rounds: int) -> Iterator[Row]:
    done = fit(callbacks=[ModelCheckpoint()]).run(Net(), batches(4))
    script = Path(sys.executable).with_name("fit")
    program = [str(script)] if script.exists() else [sys.executable, "-m", "engine.cli.main"]
    asked = [("checkpoint", name, str(done.last_checkpoint)) for name in ("show", "verify")]
    for words in [("checkpoint", "list", str(done.folder)), *asked, ("migrate", __file__)]:
        rows = seconds([partial(output, *program, *words)], rounds, clock=children)
        yield f"fit {' '.join(words[:-1])}", median(row[0] for row in rows) * 1e3, "ms"


def record(rounds: int, count: int = 2000) -> Iterator[Row]:
    rows, pages = [], []
    for _ in range(Rounds.warm_ups + rounds):
        report = Report()
        row, page = hook_seconds(report, "on_log"), hook_seconds(report, "teardown")
        fit(log_every_n_steps=1, callbacks=[report]).run(Net(), batches(count))
        rows.append(sum(row) / count * 1e6)
        pages.append(sum(page) / count * 1e6)
    yield from median_and_least("Report, a row", rows[Rounds.warm_ups :], "us")
    yield from median_and_least("Report, a row's part of the page", pages[Rounds.warm_ups :], "us")


SCRIPT = """
import sys; sys.path.insert(0, {here!r})
import tempfile, fixed_costs as f
from engine import Fit
Fit(accelerator="cpu", devices=2, root_dir={folder!r}).run(f.Net(), f.batches(20))
"""


BARE = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
for batch in [torch.ones(2, 4)] * 10:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()  # a rank that ends while the other still works aborts it
dist.destroy_process_group()
"""


def two_ranks(rounds: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        script, bare = Path(folder) / "train.py", Path(folder) / "bare.py"
        script.write_text(SCRIPT.format(here=str(Path(__file__).parent), folder=folder))
        bare.write_text(BARE)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        calls = [partial(output, sys.executable, str(script)), partial(output, *torchrun, str(bare))]
        used: list[list[float]] = [[], []]
        timed = [partial(_noting_children, call, times) for call, times in zip(calls, used, strict=True)]
        rows = seconds(timed, rounds, clock=time.perf_counter)
        for index, name in enumerate(("a script of ten steps on two ranks", "a bare one under torchrun")):
            yield f"{name}, wall", median(row[index] for row in rows), "s"
            yield f"{name}, all processes", median(used[index][-rounds:]), "s"
        yield "wall, ours over the bare one's in the same round", median(row[0] / row[1] for row in rows), ""


def _noting_children(call: Callable[[], object], times: list[float]) -> None:
    """Call, and append the processor seconds of the processes that the call has started."""
    began = children()
    call()
    times.append(children() - began)


def evaluations(rounds: int) -> Iterator[Row]:
    net, data = Net(), DataLoader(torch.ones(2, 4), batch_size=2)
    ours = fit()

    def bare() -> None:
        optimizer = net.configure_optimizers()
        for batch in data:
            net.layer(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    calls: dict[str, Callable[[], object]] = {
        "a validate of one batch": lambda: ours.validate(net, data),
        "a predict of one batch": lambda: ours.predict(net, data),
        "a run of one step": lambda: ours.run(net, data),
        "a bare loop of one step": bare,
    }
    if find_spec("lightning"):
        import lightning

        class Theirs(lightning.LightningModule):
            """:class:`Net` of theirs."""

            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4)

            training_step, validation_step = Net.training_step, Net.validation_step
            predict_step, configure_optimizers = Net.predict_step, Net.configure_optimizers

        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
        trainer = partial(lightning.Trainer, accelerator="cpu", devices=1, max_epochs=1, **quiet)
        one, theirs = trainer(), Theirs()
        calls |= {
            "Lightning, a validate": lambda: one.validate(theirs, data, verbose=False),
            "Lightning, a predict": lambda: one.predict(theirs, data),
            "Lightning, a Trainer and a fit": lambda: trainer().fit(theirs, data),
        }
    if find_spec("accelerate"):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)

        def with_accelerate() -> None:
            optimizer: Any
            layer, optimizer, loader = accelerator.prepare(net.layer, net.configure_optimizers(), data)
            for batch in loader:
                accelerator.backward(layer(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()

        calls["Accelerate, prepare and a loop of one step"] = with_accelerate
    rows = seconds([*calls.values()], 5 * rounds, times=3)
    for index, name in enumerate(calls):
        yield from median_and_least(name, [row[index] * 1e3 for row in rows], "ms")


PARTS = {
    part.__name__: part for part in (collection, removal, memory, predictions, commands, record, two_ranks, evaluations)
}
SMALLEST: dict[str, dict[str, int]] = {
    "removal": {"most": 10},
    "memory": {"width": 30},
    "predictions": {"count": 10},
    "record": {"count": 10},
}
"""Arguments of the parts with ``--smallest``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"all by default; {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5, help="times that everything is measured (5)")
    parser.add_argument(
        "--smallest", action="store_true", help="one round of the least that runs, to see that all parts work"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"{', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    if args.smallest:
        Rounds.warm_ups = 0
    for name in args.parts or PARTS:
        rows = PARTS[name](1, **SMALLEST.get(name, {})) if args.smallest else PARTS[name](args.rounds)
        for what, value, unit in rows:
            print(f"{what:<60} {value:10.2f} {unit}", flush=True)


if __name__ == "__main__":
    main()
