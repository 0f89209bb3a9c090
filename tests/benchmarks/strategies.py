"""Time of a step under each strategy: Fit beside a loop written by hand with the same torch primitives, and beside its peers.

    python tests/benchmarks/strategies.py [--case ddp --case tp] [--rounds 12] [--steps 30] [--no-peers]

Two real processes over gloo on the CPU, one thread each; "tp x fsdp" has four. For every case:

    for each round:                      # every contender once, each round starting with another one, in the same processes
        a new model; a few steps to warm up; then the clock runs for ``--steps`` steps
    ratio = the median over the rounds of a contender's time divided by the bare loop's of the same round

"bare again" is the same loop once more: how far its ratio is from 1 is the error of all this. Everyone trains the same small
transformer with AdamW, and clips the global norm of the gradients to 1. Two busy cores need many rounds for a steady ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, Size

from engine import FSDP, Callback, Fit, MeshParallel

WARM = 4
SIZE = Size(layers=4, heads=4, width=160, context=64, batch_size=8, lr=1e-3, max_steps=100)
MICROBATCHES = 4


class Model(GPT):
    """The loss is a plain mean, and nothing is logged; the output layer has a weight of its own, so that a pipeline has none to share."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(SIZE, SIZE.max_steps)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self(batch[:, :-1]), batch[:, 1:])

    def configure_optimizers(self) -> Any:
        return adamw(self)

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {name: style for name, style in super().parallelize(mesh).items() if name.startswith("layers")}


class Loss(nn.Module):
    """The step as a forward pass, for wrappers that work on forward passes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        return loss_of(self.model(batch[:, :-1]), batch[:, 1:])


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=SIZE.lr, **options)


def batches(ranks: int) -> list[Tensor]:
    """This rank's, of ``ranks`` that see different data."""
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(256, (8, ranks, SIZE.batch_size, SIZE.context + 1), generator=generator)
    return list(found[:, dist.get_rank() * ranks // dist.get_world_size()])


class Clock:
    """Seconds of the steps after the first ``WARM``."""

    def __init__(self, steps: int) -> None:
        self.steps, self.taken, self.began, self.seconds = steps, 0, 0.0, 0.0

    def tick(self) -> bool:
        """After a step; whether it was the last."""
        self.taken += 1
        if self.taken == WARM:
            self.began = time.perf_counter()
        if self.taken == WARM + self.steps:
            self.seconds = (time.perf_counter() - self.began) / self.steps
            return True
        return False


def loop(clock: Clock, data: list[Tensor], step: Callable[[Tensor], object]) -> float:
    index = 0
    while True:
        step(data[index % len(data)])
        index += 1
        if clock.tick():
            return clock.seconds


# -- loops written by hand ------------------------------------------------------------------------------------------------------------


def bare_data_parallel(model: nn.Module, steps: int) -> float:
    optimizer = adamw(model)

    def step(batch: Tensor) -> None:
        model(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return loop(Clock(steps), batches(2), step)


def bare_ddp(steps: int) -> float:
    return bare_data_parallel(nn.parallel.DistributedDataParallel(Loss(Model())), steps)


def bare_fsdp(steps: int) -> float:
    from torch.distributed.fsdp import fully_shard

    module = Model()
    for block in module.layers:
        fully_shard(block)
    return bare_data_parallel(fully_shard(Loss(module)), steps)


def bare_tp(steps: int) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = Model()
    styles = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (2,))
    for block in model.layers:
        parallelize_module(block, mesh, styles)
    optimizer = adamw(model, foreach=False)  # torch's foreach functions take no mix of cut and whole parameters
    loss = Loss(model)

    def step(batch: Tensor) -> None:
        loss(batch).backward()
        clip_over_parts(list(model.parameters()), None)
        optimizer.step()
        optimizer.zero_grad()

    return loop(Clock(steps), batches(1), step)


def clip_over_parts(parameters: list[Any], group: Any) -> None:
    """Clip to a global norm of 1, where a rank has parts of some gradients (DTensor), and (``group``) of the model."""
    grads = [p.grad for p in parameters if p.grad is not None]
    cut = [g.to_local() for g in grads if hasattr(g, "to_local")]
    whole = [g for g in grads if not hasattr(g, "to_local")]
    squares = torch.zeros(())
    if cut:
        squares = torch.nn.utils.get_total_norm(cut) ** 2
        dist.all_reduce(squares)
    if whole:
        squares = squares + torch.nn.utils.get_total_norm(whole) ** 2
    if group is not None:
        dist.all_reduce(squares, group=group)
    factor = torch.clamp(1.0 / (squares.sqrt() + 1e-6), max=1.0)
    torch._foreach_mul_(cut + whole, factor)


def bare_pp(steps: int) -> float:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import Schedule1F1B

    parts, rank = Model().pipeline_stages(), dist.get_rank()
    cut = len(parts) // 2  # embed, two blocks; two blocks, norm, head
    module = nn.Sequential(*(parts[cut:] if rank else parts[:cut]))
    rows = SIZE.batch_size // MICROBATCHES
    ids = torch.zeros(rows, SIZE.context, dtype=torch.long, device="meta")
    hidden = torch.zeros(rows, SIZE.context, SIZE.width, device="meta", requires_grad=True)
    logits = torch.zeros(rows, SIZE.context, 256, device="meta", requires_grad=True)
    stage = PipelineStage(
        module,
        rank,
        2,
        torch.device("cpu"),
        input_args=hidden if rank else ids,
        output_args=logits if rank else hidden,
        group=dist.group.WORLD,
    )
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = adamw(module)
    reported = torch.zeros(())

    def step(batch: Tensor) -> None:
        losses: list[Tensor] = []
        schedule.step(*(() if rank else (batch[:, :-1],)), target=batch[:, 1:], losses=losses)
        if rank:
            reported.copy_(torch.stack(losses).mean().detach())
        dist.broadcast(reported, 1)  # the loss, on every rank
        clip_over_parts(list(module.parameters()), dist.group.WORLD)
        optimizer.step()
        optimizer.zero_grad()

    return loop(Clock(steps), batches(1), step)


def bare_deepspeed(stage: int) -> Callable[[int], float]:
    def train(steps: int) -> float:
        with quiet():
            import deepspeed

            model = Loss(Model())
            config = {
                "train_micro_batch_size_per_gpu": SIZE.batch_size,
                "gradient_clipping": 1.0,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            }
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=adamw(model), config=config, dist_init_required=False
            )

        def step(batch: Tensor) -> None:
            engine.backward(engine(batch))
            engine.step()

        seconds = loop(Clock(steps), batches(2), step)
        engine.destroy()
        return seconds

    return train


# -- ours and peers -------------------------------------------------------------------------------------------------------------------


class Timer(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, *args: Any) -> None:
        self.clock.tick()


def ours(strategy: Callable[[], Any], ranks: int) -> Callable[[int], float]:
    def train(steps: int) -> float:
        clock = Clock(steps)
        with tempfile.TemporaryDirectory() as root, quiet():
            fit = Fit(
                accelerator="cpu", strategy=strategy(), max_steps=WARM + steps, gradient_clip_val=1.0, callbacks=[Timer(clock)], root_dir=root,
                log_every_n_steps=0,
            )  # fmt: skip
            generator = torch.Generator().manual_seed(1)
            flat = torch.randint(256, (8 * ranks, SIZE.batch_size, SIZE.context + 1), generator=generator)
            fit.run(Model(), list(flat) * (1 + (WARM + steps) // 8))
        return clock.seconds

    return train


def accelerate(fsdp: bool) -> Callable[[int], float]:
    def train(steps: int) -> float:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        one = Accelerator(cpu=True, fsdp_plugin=plugin if fsdp else None)
        model, optimizer = one.prepare(module := Loss(Model()), adamw(module))
        if fsdp and not any(hasattr(p, "placements") for p in model.parameters()):
            raise RuntimeError(f"nothing is sharded on the CPU: the model is a {type(model).__name__}")

        def step(batch: Tensor) -> None:
            one.backward(model(batch))
            one.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return loop(Clock(steps), batches(2), step)

    return train


def lightning(strategy: str) -> Callable[[int], float]:
    def train(steps: int) -> float:
        import lightning.pytorch as pl

        clock = Clock(steps)

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.loss = Loss(Model())

            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                return self.loss(batch)

            def configure_optimizers(self) -> Any:
                return adamw(self)

        class Timed(pl.Callback):
            def on_train_batch_end(self, *args: Any) -> None:
                clock.tick()

        with quiet():
            trainer = pl.Trainer(
                accelerator="cpu", devices=2, strategy=strategy, max_steps=WARM + steps, gradient_clip_val=1.0, callbacks=[Timed()], logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
            )  # fmt: skip
            trainer.fit(
                Module(), DataLoader(batches(2) * (1 + (WARM + steps) // 8), batch_size=None)
            )  # it takes a list for several loaders
        return clock.seconds

    return train


def mesh_of_four() -> Any:
    return MeshParallel(tp=2)


def bare_tp_fsdp(steps: int) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = Model()
    styles = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in module.layers:
        parallelize_module(block, mesh["tp"], styles)
        fully_shard(block, mesh=mesh["dp"])
    model = fully_shard(Loss(module), mesh=mesh["dp"])
    optimizer = adamw(model)
    tensor_parallel = mesh.get_group("tp")

    def step(batch: Tensor) -> None:
        model(batch).backward()
        cut, whole = torch.zeros(()), torch.zeros(())
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for p in model.parameters():
            groups[
                "tp" in p.grad.device_mesh.mesh_dim_names and any(q.is_shard() for q in p.grad.placements[1:])
            ].append(p.grad.to_local())
        if groups[True]:
            cut = torch.nn.utils.get_total_norm(groups[True]) ** 2
            dist.all_reduce(cut, group=tensor_parallel)
        whole = torch.nn.utils.get_total_norm(groups[False]) ** 2
        squares = cut + whole
        dist.all_reduce(squares, group=mesh.get_group("dp"))
        torch._foreach_mul_([*groups[True], *groups[False]], torch.clamp(1.0 / (squares.sqrt() + 1e-6), max=1.0))
        optimizer.step()
        optimizer.zero_grad()

    return loop(Clock(steps), batches(2), step)


def pipeline() -> Any:
    return MeshParallel(pp=2, num_microbatches=MICROBATCHES, split=["layers.2"])


CASES: dict[str, tuple[int, Callable[[int], float], Callable[[int], float], dict[str, Callable[[int], float]]]] = {
    "ddp": (2, bare_ddp, ours(lambda: "ddp", 2), {"Accelerate": accelerate(fsdp=False), "Lightning": lightning("ddp")}),
    "fsdp": (2, bare_fsdp, ours(FSDP, 2), {"Accelerate": accelerate(fsdp=True), "Lightning": lightning("fsdp")}),
    "tp": (2, bare_tp, ours(lambda: "tp", 1), {}),
    "pp": (2, bare_pp, ours(pipeline, 1), {}),
    "deepspeed 1": (
        2,
        bare_deepspeed(1),
        ours(lambda: "deepspeed_stage_1", 2),
        {"Lightning": lightning("deepspeed_stage_1")},
    ),
    "deepspeed 2": (2, bare_deepspeed(2), ours(lambda: "deepspeed_stage_2", 2), {}),
    "tp x fsdp": (4, bare_tp_fsdp, ours(mesh_of_four, 2), {}),
}
"""By case: processes, the bare loop, ours, peers that may support it on the CPU."""


@contextmanager
def quiet() -> Any:
    """Peers and DeepSpeed announce themselves at length."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nothing:
        warnings.simplefilter("ignore")
        out, sys.stdout = sys.stdout, nothing
        try:
            yield
        finally:
            sys.stdout = out


def worker(args: argparse.Namespace) -> None:
    """One rank: every case of this number of processes; rank 0 writes the seconds to the file ``args.worker``."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name in args.case:
        _, bare, mine, peers = CASES[name]
        contenders = {"bare": bare, "Fit": mine, "bare again": bare, **({} if args.no_peers else peers)}
        seconds: dict[str, list[float]] = {}
        missing: dict[str, str] = {}
        for turn in range(args.rounds + 1):  # the first round only warms up
            names = [n for n in contenders if n not in missing]
            for contender in names[turn % len(names) :] + names[: turn % len(names)]:
                dist.barrier()
                try:
                    with quiet():
                        value = contenders[contender](args.steps)
                except Exception as error:
                    if contender in ("bare", "Fit", "bare again"):
                        raise
                    missing[contender] = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
                    continue
                if turn:
                    seconds.setdefault(contender, []).append(value)
        found[name] = {"seconds": seconds, "missing": missing}
        if dist.get_rank() == 0:
            print(f"{name}: {args.rounds} rounds of {args.steps} steps", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        Path(args.worker).write_text(json.dumps(found))
    dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def measured(args: argparse.Namespace, processes: int, cases: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            __file__,
        ]
        command += [
            f"--rounds={args.rounds}",
            f"--steps={args.steps}",
            f"--worker={path}",
            *(f"--case={name}" for name in cases),
        ]
        subprocess.run(command + ["--no-peers"] * args.no_peers, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of a step under each strategy, beside a bare loop and peers.")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.case = args.case or list(CASES)
    if args.worker:
        worker(args)
        return
    found: dict[str, Any] = {}
    for processes in (2, 4):
        if cases := [name for name in args.case if CASES[name][0] == processes]:
            found |= measured(args, processes, cases)
    table = Table(
        title="Time of a step: milliseconds of the bare loop, and ratios to it (median; of the fastest rounds)"
    )
    columns = ["Fit", "bare again", "Accelerate", "Lightning"]
    for column in ("case", "bare", *columns):
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for name, case in found.items():
        seconds = case["seconds"]
        cells = []
        for column in columns:
            if column in seconds:
                ratio = median(mine / base for mine, base in zip(seconds[column], seconds["bare"], strict=True))
                cells.append(f"{ratio:.3f} ({min(seconds[column]) / min(seconds['bare']):.3f})")
            else:
                cells.append("no" if column in case["missing"] else "-")
        table.add_row(name, f"{median(seconds['bare']) * 1e3:.2f}", *cells)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for name, case in found.items():
        for contender, reason in case["missing"].items():
            console.print(f"{name}, {contender}: {reason}", markup=False)


if __name__ == "__main__":
    main()
