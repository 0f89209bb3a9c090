"""The checks of ``fit test``: ``python -m engine.cli.self_check_jobs CHECK ... --report FILE``, in an empty directory."""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from engine.callback import Callback
from engine.cli import self_check_collectives
from engine.config.settings import Settings
from engine.distributed.environments import detect
from engine.distributed.join import join_alone
from engine.fit import Fit
from engine.launch.script_ranks import joined
from engine.loop.run import Run
from engine.module import TrainModule
from engine.utils import accelerator

SEED = 7
EPOCHS = 2
REFERENCE = Path("reference")
"""Where the run on one device saves its checkpoint, for comparison with runs on several."""
ROUNDINGS = 8.0
"""Maximum difference of a weight, in rounding errors of a product of matrices: sums are in another order, and perhaps in other kernels."""


class Net(TrainModule):
    """A regression that keeps its losses."""

    def __init__(self, dropout: float = 0.0, seed: int = SEED) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 1))
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs).float(), targets)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        # Adam would make a rounding error of a small gradient as large as the gradient.
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class Save(Callback):
    """Saves a checkpoint at the end."""

    def __init__(self, folder: Path, asynchronous: bool = False) -> None:
        self.folder, self.asynchronous = folder, asynchronous

    @property
    def checkpoints_in(self) -> Path:
        return self.folder

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        run.checkpoints_at(self.folder)

    def on_train_end(self, run: Run, module: nn.Module) -> None:
        run.save_checkpoint("end", asynchronous=self.asynchronous)


class Ranks:
    """The number of processes of the checks with several, and their devices."""

    def __init__(self) -> None:
        kind = accelerator.device_type("auto")
        found = accelerator.devices(kind)
        self.kind, self.count = (kind, found) if found > 1 else ("cpu", 2)
        self.batch = 2 * self.count
        """Samples of a step."""

    def __str__(self) -> str:
        return f"{self.count} x {self.kind}"


def loader(samples: int, size: int) -> DataLoader[Any]:
    """Batches of a fixed regression."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(samples, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), size, shuffle=True)


def trained(module: Net, kind: str, ranks: Ranks, devices: int = 1, resume: str | None = None, **settings: Any) -> Net:
    """The module after a run over the same global batches, however many devices share them."""
    settings = {"strategy": "auto", "max_epochs": EPOCHS, "callbacks": [], **settings}
    fit = Fit(accelerator=kind, devices=devices, seed=SEED, num_sanity_val_steps=0, root_dir="runs", **settings)
    fit.run(module, loader(4 * ranks.batch, ranks.batch // devices), resume=resume)
    return module


def store(kind: str, ranks: Ranks) -> str | None:
    """A store can be reached on the loopback. Only jobs on several machines need the host's name."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=5)).set("key", "value")
    name = socket.gethostname()
    try:
        socket.create_connection((name, server.port), timeout=5).close()
    except OSError as error:
        return f"but not under this host's name, {name!r} ({error}): other machines will not reach it either"
    return None


def single(kind: str, ranks: Ranks) -> None:
    """One device: the loss falls, and the weights are saved for comparison."""
    module = trained(Net(), kind, ranks, callbacks=[Save(REFERENCE)])
    first, last = (float(torch.stack(part).mean()) for part in (module.losses[:4], module.losses[-4:]))
    assert last < first, f"the loss did not fall: {first:.3g} in the first epoch, {last:.3g} in the last"


def bf16(kind: str, ranks: Ranks) -> None:
    """Close to full precision."""
    module = trained(Net(), kind, ranks, precision="bf16-mixed")
    assert all(p.dtype is torch.float32 for p in module.parameters()), "parameters are no longer float32"
    difference = _difference(module)
    assert 0 < difference < 0.05, f"weights differ from those in full precision by {difference:.2g}"


def resume(kind: str, ranks: Ranks) -> None:
    """A run that was interrupted and resumed, and one that was not, with dropout: the same losses."""
    whole = trained(Net(0.5), kind, ranks).losses
    half = trained(Net(0.5), kind, ranks, max_epochs=EPOCHS // 2, callbacks=[Save(Path("half"))]).losses
    rest = trained(Net(0.5, seed=0), kind, ranks, callbacks=[Save(Path("half"))], resume="last").losses
    want, have = torch.stack(whole).tolist(), torch.stack([*half, *rest]).tolist()
    assert want == have, f"losses without interruption {want}, with {have}"


def together(kind: str, ranks: Ranks) -> None:
    """Collectives return the defined results."""
    with joined(Settings(accelerator=kind, devices=ranks.count, strategy="ddp")) as group:
        self_check_collectives.check(group)


def one_rank(kind: str, ranks: Ranks) -> str:
    """One device calls every collective in its own back end; DDP and FSDP2 save while they train, and continue, over one rank."""
    kind, told = _with_collectives(kind)
    group = join_alone(accelerator.device(kind, 0), timeout=timedelta(seconds=60))
    try:
        self_check_collectives.check(group)
        details = []
        for name in ("ddp", "fsdp"):
            folder = Path(f"alone-{name}")
            saves = Save(folder, asynchronous=True)
            trained(Net(), kind, ranks, max_epochs=EPOCHS // 2, strategy=name, callbacks=[saves])
            trained(Net(seed=0), kind, ranks, resume="last", strategy=name, callbacks=[saves])
            details.append(_compared(Net.load_from_checkpoint(folder), kind))
        return told + details[-1]
    finally:
        group.close()


def _with_collectives(kind: str) -> tuple[str, str]:
    """The device whose back end can be tried, and what to say if it is not this one: gloo, which MPS has, takes no tensors of MPS."""
    try:
        found = "gloo" if kind == "cpu" else accelerator.collectives_backend(accelerator.device(kind, 0))
    except RuntimeError:
        found = "gloo"
    if kind == "cpu" or found != "gloo":
        return kind, ""
    return "cpu", f"{kind} has no collectives of its own, only one rank can train on it; on the CPU: "


def strategy(name: str) -> Callable[[str, Ranks], str]:
    """Several devices under a strategy give the same weights as one."""

    def check(kind: str, ranks: Ranks) -> str:
        folder = Path(f"trained-{name}")
        trained(Net(), kind, ranks, ranks.count, strategy=name, callbacks=[Save(folder)])
        return _compared(Net.load_from_checkpoint(folder), kind)

    return check


def rounding(kind: str) -> float:
    """The largest error of a product of float32 matrices on this device, by its largest element: about 1e-7, with TF32 4e-4."""
    generator = torch.Generator().manual_seed(SEED)
    left, right = torch.randn(64, 64, generator=generator), torch.randn(64, 64, generator=generator)
    exact = left.double() @ right.double()
    found = (left.to(kind) @ right.to(kind)).cpu().double()
    return float((found - exact).abs().max() / exact.abs().max())


def _compared(module: Net, kind: str) -> str:
    """The difference from the weights of one process, beside what rounding on this device and on that process's allows."""
    error = max(rounding(each) for each in {kind, accelerator.device_type("auto")})
    difference, most = _difference(module), ROUNDINGS * error
    told = f"{difference:.1g}; products are rounded to {error:.1g} here, which allows {most:.1g}"
    assert difference <= most, f"weights differ from those of one process by {told}"
    return f"weights differ by {told}"


def _difference(module: Net) -> float:
    reference = Net.load_from_checkpoint(REFERENCE).state_dict()
    return max(
        float((reference[name].cpu() - tensor.cpu()).abs().max()) for name, tensor in module.state_dict().items()
    )


CHECKS: dict[str, tuple[Callable[[str, Ranks], str | None], bool]] = {
    "store": (store, False),
    "single": (single, False),
    "bf16": (bf16, False),
    "resume": (resume, False),
    "one rank": (one_rank, False),
    "collectives": (together, True),
    "ddp": (strategy("ddp"), True),
    "fsdp": (strategy("fsdp"), True),
    "deepspeed": (strategy("deepspeed_stage_2"), True),
}
"""Name -> the check, and whether it needs several devices."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checks", nargs="+", choices=CHECKS)
    parser.add_argument("--report", type=Path, required=True, help="one line of JSON for each finished check")
    arguments = parser.parse_args()
    ranks = Ranks()
    own = accelerator.device_type("auto")
    for name in arguments.checks:
        check, several = CHECKS[name]
        began, ok = time.perf_counter(), False
        try:
            detail = check(ranks.kind if several else own, ranks) or ""
            ok = True
        except AssertionError as error:
            detail = str(error)
        except Exception as error:
            if several:
                raise  # the other ranks are elsewhere
            detail = f"{type(error).__name__}: {' '.join(str(error).split())}"
        seconds = round(time.perf_counter() - began, 2)
        line = {
            "check": name,
            "devices": str(ranks) if several else f"1 x {own}",
            "ok": ok,
            "detail": detail,
            "seconds": seconds,
        }
        if detect(os.environ).rank == 0:
            with arguments.report.open("a") as file:
                file.write(f"{json.dumps(line)}\n")


if __name__ == "__main__":
    main()
