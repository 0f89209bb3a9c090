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
from engine.config.settings import Settings
from engine.distributed import collectives, process_groups
from engine.distributed.agreement import Agreement, Stopwatch
from engine.distributed.environments import detect
from engine.distributed.group import Group
from engine.distributed.join import join_alone
from engine.fit import Fit
from engine.launch.script_ranks import joined_group
from engine.loop.run import Run
from engine.loop.stopping import STOP
from engine.module import TrainModule
from engine.utils import accelerator

SEED = 7
EPOCHS = 2
REFERENCE = Path("reference")
"""Where the training on one device saves its checkpoint, with which trainings on several devices are compared."""
ROUNDINGS = 8.0
"""The maximum difference between two weights, in rounding errors of a matrix product: sums may be in another order, or in other kernels."""


class Net(TrainModule):
    """A regression model that keeps the losses of its steps."""

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
    """Saves a checkpoint at the end of the training."""

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
    """The number of processes in checks with several, and their kind of device."""

    def __init__(self) -> None:
        kind = accelerator.device_type("auto")
        devices = accelerator.devices(kind)
        self.kind, self.count = (kind, devices) if devices > 1 else ("cpu", 2)
        self.batch = 2 * self.count
        """Samples of a step."""

    def __str__(self) -> str:
        return f"{self.count} x {self.kind}"


def loader(samples: int, size: int) -> DataLoader[Any]:
    """A loader of a fixed regression problem."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(samples, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), size, shuffle=True)


def trained(module: Net, kind: str, ranks: Ranks, devices: int = 1, resume: str | None = None, **settings: Any) -> Net:
    """Train ``module`` with the same global batches on any number of devices, and return it."""
    settings = {"strategy": "auto", "max_epochs": EPOCHS, "callbacks": [], **settings}
    fit = Fit(accelerator=kind, devices=devices, seed=SEED, num_sanity_val_steps=0, root_dir="runs", **settings)
    fit.run(module, loader(4 * ranks.batch, ranks.batch // devices), resume=resume)
    return module


def store(kind: str, ranks: Ranks) -> str | None:
    """Check that a store can be reached on the loopback; return a notice if it cannot be under the host's name, which only jobs on several machines
    need."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=5)).set("key", "value")
    name = socket.gethostname()
    try:
        socket.create_connection((name, server.port), timeout=5).close()
    except OSError as error:
        return f"but not under this host's name, {name!r} ({error}): other machines will not reach it either"
    return None


def single(kind: str, ranks: Ranks) -> None:
    """Check that the loss falls on one device; save the weights for comparison."""
    module = trained(Net(), kind, ranks, callbacks=[Save(REFERENCE)])
    first, last = (float(torch.stack(part).mean()) for part in (module.losses[:4], module.losses[-4:]))
    assert last < first, f"the loss did not fall: {first:.3g} in the first epoch, {last:.3g} in the last"


def bf16(kind: str, ranks: Ranks) -> None:
    """Check that training in bf16-mixed gives almost the weights of full precision."""
    module = trained(Net(), kind, ranks, precision="bf16-mixed")
    assert all(p.dtype is torch.float32 for p in module.parameters()), "parameters are no longer float32"
    difference = _difference(module)
    assert 0 < difference < 0.05, f"weights differ from those in full precision by {difference:.2g}"


def resume(kind: str, ranks: Ranks) -> None:
    """Check that a training with dropout that was interrupted and resumed has the same losses as one that was not."""
    uninterrupted = trained(Net(0.5), kind, ranks).losses
    first_half = trained(Net(0.5), kind, ranks, max_epochs=EPOCHS // 2, callbacks=[Save(Path("half"))]).losses
    second_half = trained(Net(0.5, seed=0), kind, ranks, callbacks=[Save(Path("half"))], resume="last").losses
    expected, actual = torch.stack(uninterrupted).tolist(), torch.stack([*first_half, *second_half]).tolist()
    assert expected == actual, f"losses without interruption {expected}, with {actual}"


def collectives_of_ranks(kind: str, ranks: Ranks) -> None:
    """Check that collectives of several ranks return the defined results."""
    with joined_group(Settings(accelerator=kind, devices=ranks.count, strategy="ddp")) as group:
        check_collectives(group)


def one_rank(kind: str, ranks: Ranks) -> str:
    """Check, on one device, every collective in the device's own back end, and that DDP and FSDP2 with one rank save while they train, and resume."""
    kind, notice = _with_collectives(kind)
    group = join_alone(accelerator.device(kind, 0), timeout=timedelta(seconds=60))
    try:
        check_collectives(group)
        details = []
        for name in ("ddp", "fsdp"):
            folder = Path(f"alone-{name}")
            saves = Save(folder, asynchronous=True)
            trained(Net(), kind, ranks, max_epochs=EPOCHS // 2, strategy=name, callbacks=[saves])
            trained(Net(seed=0), kind, ranks, resume="last", strategy=name, callbacks=[saves])
            details.append(_compared(Net.load_from_checkpoint(folder), kind))
        return notice + details[-1]
    finally:
        group.close()


def _with_collectives(kind: str) -> tuple[str, str]:
    """The device whose back end can be checked, and a notice if it is not ``kind``: gloo, the back end for MPS, takes no tensors of MPS."""
    try:
        backend = "gloo" if kind == "cpu" else accelerator.collectives_backend(accelerator.device(kind, 0))
    except RuntimeError:
        backend = "gloo"
    if kind == "cpu" or backend != "gloo":
        return kind, ""
    return "cpu", f"{kind} has no collectives of its own, only one rank can train on it; on the CPU: "


def strategy(name: str) -> Callable[[str, Ranks], str]:
    """A check that several devices under a strategy give the same weights as one device."""

    def check(kind: str, ranks: Ranks) -> str:
        folder = Path(f"trained-{name}")
        trained(Net(), kind, ranks, ranks.count, strategy=name, callbacks=[Save(folder)])
        return _compared(Net.load_from_checkpoint(folder), kind)

    return check


def rounding(kind: str) -> float:
    """The largest error of a product of float32 matrices on this device, relative to its largest element: about 1e-7, with TF32 4e-4."""
    generator = torch.Generator().manual_seed(SEED)
    first, second = torch.randn(64, 64, generator=generator), torch.randn(64, 64, generator=generator)
    exact = first.double() @ second.double()
    product = (first.to(kind) @ second.to(kind)).cpu().double()
    return float((product - exact).abs().max() / exact.abs().max())


def _compared(module: Net, kind: str) -> str:
    """Compare a module with the one that a single process trained, and describe the difference; it must be within the rounding of both devices."""
    error = max(rounding(device_kind) for device_kind in {kind, accelerator.device_type("auto")})
    difference, limit = _difference(module), ROUNDINGS * error
    comparison = f"{difference:.1g}; products are rounded to {error:.1g} here, which allows {limit:.1g}"
    assert difference <= limit, f"weights differ from those of one process by {comparison}"
    return f"weights differ by {comparison}"


def _difference(module: Net) -> float:
    """The largest difference of a weight from the single process's."""
    reference = Net.load_from_checkpoint(REFERENCE).state_dict()
    return max(
        float((reference[name].cpu() - tensor.cpu()).abs().max()) for name, tensor in module.state_dict().items()
    )


# -- collectives ---------------------------------------------------------------------------------------------------------------------


def check_collectives(group: Group) -> None:
    """Call every collective of the library once, on this group's device and on the CPU, with results that can be worked out by hand. All ranks
    have to call this function.

    Raises:
        AssertionError: a collective returned a wrong result.
    """
    for device in dict.fromkeys((torch.device("cpu"), group.device)):
        _check_device(group, device)
    _check_objects(group)
    _check_bare(group)
    group.barrier()


def _check_device(group: Group, device: torch.device) -> None:
    """Check the library's collectives of tensors on one device."""
    size, place = group.world_size, f"on {device}"
    own_tensor = torch.full((3,), float(group.rank + 1), device=device)
    total = size * (size + 1) / 2
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for op, expected in {"sum": total, "mean": total / size, "min": 1, "max": size}.items():
            result = collectives.all_reduce(group, own_tensor.to(dtype), op)
            _check_result(f"all_reduce ({op}, {dtype}) {place}", result, [expected] * 3)
    _check_result(f"all_reduce (sum, bool) {place}", collectives.all_reduce(group, own_tensor > 1), [size - 1] * 3)
    _check_result(f"gather {place}", collectives.gather(group, own_tensor[:1]), list(range(1, size + 1)))
    uneven = collectives.gather(group, own_tensor[:1].expand(group.rank + 1))
    _check_result(
        f"gather of other lengths {place}", uneven, [rank + 1 for rank in range(size) for _ in range(rank + 1)]
    )
    _check_result(f"broadcast {place}", collectives.broadcast(group, own_tensor, size - 1), [size] * 3)
    padded = collectives.pad_across_processes(group, torch.ones(group.rank + 1, device=device), pad_index=-1)
    _check_result(f"pad_across_processes {place}", padded, [1] * (group.rank + 1) + [-1] * (size - group.rank - 1))


def _check_objects(group: Group) -> None:
    """Check the library's collectives of Python objects, and the agreement to stop."""
    everybody = list(range(group.world_size))
    _check_result("gather_json", collectives.gather_json(group, group.rank), everybody)
    _check_result("gather_object", collectives.gather_object(group, group.rank), everybody)
    _check_result(
        "broadcast_object", collectives.broadcast_object(group, group.rank, group.world_size - 1), everybody[-1]
    )
    agreement = Agreement(group, Stopwatch())
    assert agreement.agree_now(STOP if group.is_main else 0), "the ranks did not agree to stop"


def _check_bare(group: Group) -> None:
    """Check the collectives of torch that FSDP and the pipeline's schedules call, in a separate group for the device's tensors."""
    size = group.world_size
    process_group = process_groups.on_device([list(range(size))], group.device)
    own_tensor = torch.full((2,), float(group.rank + 1), device=group.device)
    rows = own_tensor.new_empty(2 * size)
    _collective("all_gather_single", "all_gather_into_tensor")(rows, own_tensor, group=process_group)
    _check_result("all_gather_into_tensor", rows, [rank + 1 for rank in range(size) for _ in range(2)])
    part = own_tensor.new_empty(2)
    _collective("reduce_scatter_single", "reduce_scatter_tensor")(
        part, torch.ones(2 * size, device=group.device), group=process_group
    )
    _check_result("reduce_scatter_tensor", part, [size] * 2)
    work = dist.all_reduce(own_tensor, async_op=True, group=process_group)
    assert work is not None
    work.wait()
    _check_result("all_reduce in the background", own_tensor, [size * (size + 1) / 2] * 2)
    if size > 1:  # a rank does not send to itself
        (next_rank, previous_rank) = ((group.rank + 1) % size, (group.rank - 1) % size)
        sent, received = torch.full((2,), float(group.rank), device=group.device), torch.empty(2, device=group.device)
        pair = [
            dist.P2POp(dist.isend, sent, next_rank, process_group),
            dist.P2POp(dist.irecv, received, previous_rank, process_group),
        ]
        for request in dist.batch_isend_irecv(pair):
            request.wait()
        _check_result("send and recv", received, [previous_rank] * 2)
    dist.destroy_process_group(process_group)


def _collective(name: str, older_name: str) -> Any:
    """A collective of torch by its name since torch 2.13, or by its older name."""
    return getattr(dist, name, None) or getattr(dist, older_name)


def _check_result(call: str, result: object, expected: object) -> None:
    values = result.tolist() if isinstance(result, Tensor) else result
    assert values == expected, f"{call} returned {values}, not {expected}"


# -- the process ---------------------------------------------------------------------------------------------------------------------


CHECKS: dict[str, tuple[Callable[[str, Ranks], str | None], bool]] = {
    "store": (store, False),
    "single": (single, False),
    "bf16": (bf16, False),
    "resume": (resume, False),
    "one rank": (one_rank, False),
    "collectives": (collectives_of_ranks, True),
    "ddp": (strategy("ddp"), True),
    "fsdp": (strategy("fsdp"), True),
    "deepspeed": (strategy("deepspeed_stage_2"), True),
}
"""Name of a check -> its function, and whether it needs several devices."""


def main() -> None:
    """Run the checks that the command line names, and append the result of each one to the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checks", nargs="+", choices=CHECKS)
    parser.add_argument("--report", type=Path, required=True, help="one line of JSON for each finished check")
    arguments = parser.parse_args()
    ranks = Ranks()
    single_kind = accelerator.device_type("auto")
    for name in arguments.checks:
        check, needs_several = CHECKS[name]
        began, ok = time.perf_counter(), False
        try:
            detail = check(ranks.kind if needs_several else single_kind, ranks) or ""
            ok = True
        except AssertionError as error:
            detail = str(error)
        except Exception as error:
            if needs_several:
                raise  # the ranks are no longer in step, so no further check can run
            detail = f"{type(error).__name__}: {' '.join(str(error).split())}"
        seconds = round(time.perf_counter() - began, 2)
        line = {
            "check": name,
            "devices": str(ranks) if needs_several else f"1 x {single_kind}",
            "ok": ok,
            "detail": detail,
            "seconds": seconds,
        }
        if detect(os.environ).rank == 0:
            with arguments.report.open("a") as file:
                file.write(f"{json.dumps(line)}\n")


if __name__ == "__main__":
    main()
