"""Run a job for real and measure its third step: memory by category, the peak, and the collectives, by torch's profiler."""

from __future__ import annotations

import gc
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from allocations import FOREVER, LOOP, Recording, read
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from engine import Callback, Fit

STEP, OTHER = 2, "other"


class Marks(Callback):
    """At points of the third step: the time, and which storages the run's objects hold then."""

    def __init__(self, micro_batches: int) -> None:
        self.first, self.last = STEP * micro_batches, (STEP + 1) * micro_batches - 1
        self.held: dict[str, dict[int, str]] = {}
        self.sequences: list[dict[tuple[int, ...], int]] = []

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            self.sequences.append(sequence_numbers())
            self._mark("start", run, module, batch)
        elif self.first < batch_idx <= self.last:
            self._mark(f"batch {batch_idx}", run, module, batch)

    def on_before_optimizer_step(self, run: Any, module: Any, optimizer: Any) -> None:
        if run.state.batch_idx == self.last + 1:
            self._mark("backward done", run, module)

    def on_before_zero_grad(self, run: Any, module: Any, optimizer: Any) -> None:
        if run.state.batch_idx == self.last + 1:
            self._mark("stepped", run, module)

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.last:
            self._mark("end", run, module)
            self.sequences.append(sequence_numbers())

    def on_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The gradients that an optimizer steps with, which may be whole ones that it is lent."""
        if "backward done" in self.held and "stepped" not in self.held:
            gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
            found = {g.untyped_storage().data_ptr(): "gradients" for each in gradients for g in local(each)}
            self._note(f"steps {len(self.held)}", found)

    def _mark(self, name: str, run: Any, module: Any, batch: Any = None) -> None:
        if name not in self.held:
            self._note(name, objects(run, module, batch))

    def _note(self, name: str, held: dict[int, str]) -> None:
        self.held[name] = held
        with record_function(f"mark:{name}"):
            pass


def local(tensor: Any) -> list[Tensor]:
    """This rank's part of a tensor, if there is one."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return [part] if isinstance(part, Tensor) else []


def objects(run: Any, module: Any, batch: Any) -> dict[int, str]:
    """Addresses of the storages of parameters, buffers, gradients, optimizer state and the batch; the first category wins."""
    found: dict[int, str] = {}

    def add(category: str, tensors: Iterable[Any]) -> None:
        for part in (part for tensor in tensors for part in local(tensor)):
            found.setdefault(part.untyped_storage().data_ptr(), category)

    for wrapper in (each for optimizer in run.optimizers for each in [of_deepspeed(optimizer)] if each is not None):
        zero(wrapper, list(module.parameters()), add)
    states = [fsdp for m in module.modules() if (fsdp := getattr(m, "_get_fsdp_state", None)) is not None]
    params = [p for get in states if (group := get()._fsdp_param_group) is not None for p in group.fsdp_params]
    add("parameters", module.parameters())
    add("buffers", module.buffers())
    add("inputs", torch.utils._pytree.tree_leaves(batch))
    add("gradients", (p.grad for p in module.parameters()))
    add("gradients", (p.unsharded_accumulated_grad for p in params))
    add("gradients", (whole.grad for p in params if (whole := getattr(p, "_unsharded_param", None)) is not None))
    add("communication", (getattr(p, "_unsharded_param", None) for p in params))
    add("optimizer_state", (v for o in run.optimizers for s in o.state.values() for v in s.values()))
    return found


def of_deepspeed(optimizer: Any) -> Any:
    """DeepSpeed's optimizer around this one, or ``None``."""
    driven = getattr(vars(optimizer).get("zero_grad"), "__self__", None)
    engine = getattr(driven, "engine", None)
    return None if engine is None or engine.optimizer is optimizer else engine.optimizer


def zero(wrapper: Any, parameters: list[Any], add: Any) -> None:
    """What DeepSpeed's optimizer holds."""
    held = vars(wrapper)

    def of(*names: str) -> list[Any]:
        return inside([held.get(name) for name in names])

    masters = of("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
    add("parameters", [getattr(p, "ds_tensor", p) for p in parameters])
    add("parameters", [*parameters, *of("lp_param_buffer", "param_groups_fp16_flat_cpu_memory")])
    add("optimizer_state", masters)
    add("gradients", [master.grad for master in masters])
    add("gradients", of("averaged_gradients", "all_grad_tensors", "accumulated_grads_in_cpu"))
    add("gradients", of("fp32_groups_gradients_flat", "grad_partitions_flat_buffer"))
    add("gradients", [each for p in parameters for each in (p.grad, getattr(p, "grad_accum", None))])
    add("communication", inside([list(vars(bucket).values()) for bucket in held.get("ipg_buckets", {}).values()]))
    add("communication", inside(list(held.values())))


def inside(tree: Any) -> list[Any]:
    """The tensors in lists, also in those of DeepSpeed's own kind, and dicts."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [tensor for each in tree for tensor in inside(each)]
    return [tree] if isinstance(tree, Tensor) else []


def sequence_numbers() -> dict[tuple[int, ...], int]:
    """How many collectives each process group has run, by its ranks; the groups for flags on the CPU come with theirs."""
    groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}
    found: dict[tuple[int, ...], int] = {}
    for group in groups:
        ranks = tuple(dist.get_process_group_ranks(group))
        found[ranks] = found.get(ranks, 0) + group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return found


def measure(case: Any, root: Path) -> dict[str, Any]:
    """The third step of ``case`` on this rank (in the second DDP rebuilds its buckets): JSON.

    Threads of gloo hold what they have sent a moment longer than the call that waits for them, and now and then it is they who release it,
    unseen: then all ranks measure again.
    """
    gc.freeze()  # what was imported for the cases before: a run's collections would walk all of it
    for _ in range(10):
        found = _measure(case, root)
        if not any(_over_ranks(found["lost"])):
            return found
    raise AssertionError(f"released by other threads in each of ten runs: {found['lost']}")


def _over_ranks(lost: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, lost)
    return every


def _measure(case: Any, root: Path) -> dict[str, Any]:
    marks, loader = Marks(case.micro_batches), case.loader()
    with (
        warnings.catch_warnings(),
        patiently(),
        profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, acc_events=True
        ) as recorder,
    ):
        warnings.filterwarnings("ignore", ".*FSDP2-wrapped module.*")
        module = case.module()
        fit = Fit(
            accelerator="cpu", callbacks=marks, max_steps=STEP + 1, log_every_n_steps=0, num_sanity_val_steps=0, seed=1, check=False,
            root_dir=root, **case.settings(),
        )  # fmt: skip
        handle = register_optimizer_step_pre_hook(marks.on_optimizer_step)
        try:
            fit.run(module, loader)
        finally:
            handle.remove()
        del module, fit
        gc.collect()  # what is not released now was released unseen
    assert recorder.profiler is not None
    return evaluated(read(recorder.profiler.kineto_results.experimental_event_tree()), marks)


@contextmanager
def patiently() -> Iterator[None]:
    """Give gloo's threads the time to release what they have sent, after each wait."""

    def patient(wait: Any) -> Any:
        @wraps(wait)
        def waits(*args: Any) -> Any:
            found = wait(*args)
            time.sleep(0.0005)
            return found

        return waits

    with (
        patch.object(dist.Work, "wait", patient(dist.Work.wait)),
        patch.object(functional, "wait_tensor", patient(functional.wait_tensor)),
    ):
        yield


def evaluated(recording: Recording, marks: Marks) -> dict[str, Any]:
    """The numbers of the step: memory at its start, at its peak and at its end, and what it sends."""
    for name, held in marks.held.items():
        recording.assign(recording.marks[name], held)
    for sent in recording.sent:
        if any(name.startswith("_c10d_functional::") for name in sent.within):
            continue  # what tensor parallelism exchanges is activations and their gradients
        recording.assign(sent.time, dict.fromkeys(sent.pointers, "communication"))
    for moment, pointers in recording.packed:
        recording.assign(moment, dict.fromkeys(pointers, "communication"))
    start, end = recording.marks["start"], recording.marks["end"]
    kept = marks.held["end"]  # DeepSpeed's objects outlive the run
    lost = []
    for block in recording.blocks:
        unseen = block.lost or (block.end == FOREVER and block.pointer not in kept)
        of_loop = bool(block.within) and block.within[0] in LOOP
        earlier = block.start < start
        if unseen and block.start < end and (not earlier or (block.end > start and of_loop and not block.category)):
            lost.append(block)
        if earlier and (unseen or not (block.category or of_loop)):
            block.category = OTHER
        block.category = block.category or recording.by_context(block)
    levels = [{k: v for k, v in level.items() if v and k != OTHER} for level in recording.levels(start, end)]
    inside = [sent for sent in recording.sent if start < sent.time < end and not sent.again]
    count, size = Counter[str](), Counter[str]()
    for sent in inside:
        count[sent.kind] += 1
        size[sent.kind] += sent.bytes
    before, after = marks.sequences
    return {
        "start": levels[0],
        "peak": max(levels, key=lambda level: sum(level.values())),
        "end": levels[-1],
        "lost": [(block.size, block.category, block.within[-4:]) for block in lost],
        "collectives": {kind: [count[kind], size[kind]] for kind in sorted(count)},
        "groups": [[list(ranks), after[ranks] - before[ranks]] for ranks in sorted(after) if ranks in before],
    }
