"""Throughput of a run: samples, tokens and operations a second, and the share of time that was training."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from engine import Callback, Device, Run


class ThroughputMonitor(Callback):
    """Adds the throughput of the steps since the last log boundary, over all ranks, to the metrics of the training:

    ==============================  ==================================================================================
    ``throughput/samples_per_sec``  samples
    ``throughput/tokens_per_sec``   tokens of the run's clock, where rows have one length (``tokens_per_sample``); else the counts of the
                                    :class:`engine.Loss` objects; or the values of ``tokens_fn``
    ``throughput/padding``          the share of the clock's tokens that no ``Loss`` counts, such as padding, if the clock knows them
    ``throughput/steps_per_sec``    optimizer steps
    ``throughput/flops_per_sec``    floating point operations of forward and backward pass
    ``throughput/mfu``              ``flops_per_sec`` divided by the devices' peak (model FLOPs utilization)
    ``throughput/goodput``          the share of the time since the training first started that was spent in steps that count
    ==============================  ==================================================================================

    Time in validation and checkpoints does not count, waiting for data does. The first boundary only starts the clock: its steps include
    compilation. Goodput counts as lost: waiting for data, validation, checkpoints, starts, the time between a kill and the resume, and
    steps that were lost and repeated.

    Operations are counted once, by the formulas of ``torch.utils.flop_counter.FlopCounterMode``, while the first micro-batch runs: nothing is
    computed twice, and each rank counts its own part under tensor and pipeline parallelism. A compiled model runs that
    micro-batch uncompiled. All other micro-batches are taken to have as many operations. With ``activation_checkpointing`` the recomputation is
    counted, so the name is ``throughput/hfu`` (hardware FLOPs utilization). A device that is not in the table
    of ``callbacks/throughput_monitor.py``, such as a CPU, has no MFU unless ``peak_flops`` is given.

    The ranks share four numbers in one collective at a log boundary; between two boundaries nothing is called and the device does not wait.
    """

    def __init__(
        self,
        *,
        peak_flops: float | None = None,
        count_flops: bool = True,
        tokens_fn: Callable[[Any], float] | None = None,
    ) -> None:
        """
        Args:
            peak_flops: peak of one rank's device (operations a second) in the precision of the run; ``None``: from the table of known devices.
            count_flops: ``False``: no ``flops_per_sec`` and no MFU.
            tokens_fn: returns the number of tokens in this rank's micro-batch, for losses without a count. Must not wait for the device.

        Raises:
            ValueError: ``peak_flops`` is not positive, or given with ``count_flops=False``.
        """
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(
                f"ThroughputMonitor(peak_flops={peak_flops!r}): it must be positive, in operations a second"
            )
        if peak_flops is not None and not count_flops:
            raise ValueError(
                "ThroughputMonitor(peak_flops=..., count_flops=False): MFU needs the count: leave one of the two out"
            )
        self.peak_flops, self.count_flops, self.tokens_fn = peak_flops, count_flops, tokens_fn
        if tokens_fn is not None:
            self.on_train_batch_end = self._count_tokens  # type: ignore[method-assign]
        self.flops = 0
        """Operations of the counted micro-batch on this rank; 0 until it has run."""
        self._own_tokens = 0.0
        self._counting: _OperationCounter | None = None
        self._training = False
        self._began: float | None = None
        self._productive = 0.0
        self._run: Run | None = None

    # -- events ---------------------------------------------------------------------------------------------------------------------

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        self._began, self._productive, self._run, self._training = None, 0.0, None, False

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        now = time.time()
        self._began = now if self._began is None else self._began
        self._run, self._entered, self._apart = run, time.perf_counter(), run.times.apart
        self._name = "hfu" if run.settings.activation_checkpointing else "mfu"
        self._peak = self.peak_flops or peak_of(run.device, run.engine.precision.name) or 0.0
        self._last: _Counters | None = None
        self._training, self.flops, self._own_tokens = True, 0, 0.0
        if self.count_flops:
            run.phases.timers += (self._after_phase,)

    # An evaluation's metrics are logged between these two hooks.
    def on_validation_start(self, run: Run, module: nn.Module) -> None:
        self._training = False

    def on_validation_end(self, run: Run, module: nn.Module) -> None:
        self._training = self._run is not None

    def on_before_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        if self._training and (self._last is None or step > self._last.step):
            now = _Counters(run, self._own_tokens)
            before, self._last = self._last, now
            if before is not None:
                metrics.update(self._values(run, before, now))

    def on_train_end(self, run: Run, module: nn.Module) -> None:
        self._productive, self._run = self._productive_seconds(), None
        self._training = False
        self._stop_counting(run)

    def on_exception(self, run: Run, module: nn.Module, exception: BaseException) -> None:
        self._stop_counting(run)

    def state_dict(self) -> dict[str, Any]:
        return {"began": self._began, "productive": self._productive_seconds()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._began, self._productive = state["began"], state["productive"]

    # -- values ---------------------------------------------------------------------------------------------------------------------

    def _values(self, run: Run, before: _Counters, now: _Counters) -> dict[str, float]:
        assert self._began is not None
        seconds, steps = now.seconds - before.seconds, now.step - before.step
        local_values = [seconds, self.flops * (now.batches - before.batches), self._peak, float(not self._peak)]
        local_values += [self._productive_seconds(), time.time() - self._began, now.own_tokens - before.own_tokens]
        sums: list[float] = run.engine.reduce(torch.tensor(local_values, dtype=torch.float64), "sum").tolist()
        seconds, flops, peak, unknown, productive, total, own_tokens = sums
        seconds = max(seconds / run.world_size, 1e-9)
        values = {"samples_per_sec": (now.samples - before.samples) / seconds, "steps_per_sec": steps / seconds}
        if self.tokens_fn is not None:
            values["tokens_per_sec"] = own_tokens * run.engine.loss_group.world_size / run.world_size / seconds
        elif now.clock_tokens is not None:
            tokens = now.clock_tokens - (before.clock_tokens or 0)
            values["tokens_per_sec"] = tokens / seconds
            if now.tokens is not None and tokens:
                values["padding"] = max(0.0, 1 - (now.tokens - (before.tokens or 0.0)) / tokens)
        elif now.tokens is not None:
            values["tokens_per_sec"] = (now.tokens - (before.tokens or 0.0)) / seconds
        if flops:
            values["flops_per_sec"] = flops / seconds
            if not unknown:
                values[self._name] = flops / seconds / peak
        values["goodput"] = min(1.0, productive / max(total, 1e-9))
        return {f"throughput/{name}": value for name, value in values.items()}

    def _productive_seconds(self) -> float:
        """Seconds in steps so far, without waiting for data."""
        if self._run is None:
            return self._productive
        return self._productive + time.perf_counter() - self._entered - (self._run.times.apart - self._apart)

    def _count_tokens(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.tokens_fn is not None
        self._own_tokens += self.tokens_fn(batch)

    # -- operations -----------------------------------------------------------------------------------------------------------------

    def _after_phase(self, name: str, seconds: float) -> None:
        """Count operations from the arrival of the first batch to the end of its backward pass."""
        if name == "data":
            self._end_count()  # the micro-batch before had no loss
            self._counting = _OperationCounter()
            self._counting.__enter__()
        elif name in ("backward", "forward_backward", "training_step") and self._counting is not None:
            if name == "backward" and self._run is not None and not self._run.module.automatic_optimization:
                return  # training_step continues
            self.flops = self._end_count()
            if self._run is not None:
                self._stop_counting(self._run)

    def _end_count(self) -> int:
        counting, self._counting = self._counting, None
        if counting is None:
            return 0
        counting.__exit__(None, None, None)
        return counting.total

    def _stop_counting(self, run: Run) -> None:
        self._end_count()
        run.phases.timers = tuple(timer for timer in run.phases.timers if timer != self._after_phase)


class _Counters:
    """Counters at a log boundary."""

    __slots__ = ("batches", "clock_tokens", "own_tokens", "samples", "seconds", "step", "tokens")

    def __init__(self, run: Run, own_tokens: float) -> None:
        self.step, self.batches, self.samples, self.own_tokens = run.step, run.state.batches, run.samples, own_tokens
        self.tokens = run.tokens
        self.clock_tokens = run.clock.tokens if run.clock.tokens_per_sample else None
        self.seconds = time.perf_counter() - run.times.validation - run.times.checkpoint


class _OperationCounter(TorchDispatchMode):
    """Adds up the operations of the code that runs in it, by ``FlopCounterMode``'s formulas.

    Unlike ``FlopCounterMode`` it counts this rank's part of a DTensor, leaves out operations that only infer shapes, and sets no hooks on
    modules, which would make compiled models compile again.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._formulas = FlopCounterMode(display=False).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor calls the operation again, on its local tensors
        result = func(*args, **(kwargs or {}))
        formula = self._formulas.get(getattr(func, "_overloadpacket", None))
        if formula is not None and not any(
            isinstance(a, FakeTensor) or (isinstance(a, Tensor) and a.is_meta) for a in args
        ):
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


KINDS = ("fp64", "fp32", "tf32", "fp16", "bf16")

# Dense matrix multiplications (without sparsity) at the boost clock of the full power limit, in 1e12 operations a second. The first pattern
# that matches the device's name counts.
_TERA: tuple[tuple[str, dict[str, float]], ...] = (
    # NVIDIA H100 datasheet (2023), and H200 datasheet (2024): half of the numbers "with sparsity".
    (r"H100 PCIe", {"fp64": 51, "fp32": 51, "tf32": 378, "fp16": 756, "bf16": 756}),
    (r"H100 NVL", {"fp64": 60, "fp32": 60, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5}),
    (r"H100|H200|GH200", {"fp64": 67, "fp32": 67, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4}),
    # NVIDIA A100 datasheet (2021); A800 has the same cores.
    (r"A100|A800", {"fp64": 19.5, "fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}),
    # NVIDIA A30 datasheet (2022).
    (r"\bA30\b", {"fp64": 10.3, "fp32": 10.3, "tf32": 82, "fp16": 165, "bf16": 165}),
    # NVIDIA A10 datasheet (2022); A10G is another chip, and not in the table.
    (r"\bA10\b", {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125}),
    # NVIDIA L40S and L4 datasheets (2023): half of the numbers "with sparsity".
    (r"L40S", {"fp32": 91.6, "tf32": 183, "fp16": 362, "bf16": 362}),
    (r"\bL4\b", {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121}),
    # NVIDIA V100 and T4 datasheets (2020, 2019); neither has tf32 or bf16 in hardware.
    (r"V100-SXM", {"fp64": 7.8, "fp32": 15.7, "fp16": 125}),
    (r"V100-PCIE", {"fp64": 7, "fp32": 14, "fp16": 112}),
    (r"\bT4\b", {"fp32": 8.1, "fp16": 65}),
    # NVIDIA Ada architecture whitepaper (2023), fp16 with fp32 accumulation, which torch uses.
    (r"RTX 4090\b(?! D| Laptop)", {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2}),
    # NVIDIA Ampere GA102 whitepaper (2021), with fp32 accumulation.
    (r"RTX 3090\b(?! Ti)", {"fp32": 35.6, "tf32": 35.6, "fp16": 71.2, "bf16": 71.2}),
    # AMD Instinct MI300X and MI250X datasheets (2023, 2021); torch sees each of the two dies of an MI250X as a device.
    (r"MI300X", {"fp64": 163.4, "fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4}),
    (r"MI250X", {"fp64": 47.9, "fp32": 47.9, "fp16": 191.5, "bf16": 191.5}),
)


def known_peak(device_name: str, kind: str) -> float | None:
    """Peak operations a second of the device called ``device_name``; ``None`` if the device is not in the table.

    Args:
        device_name: as ``engine.Device(device).name`` gives it.
        kind: one of :data:`KINDS`.
    """
    for pattern, peaks in _TERA:
        if re.search(pattern, device_name):
            return peaks[kind] * 1e12 if kind in peaks else None
    return None


def peak_of(device: torch.device, precision: str) -> float | None:
    """Peak operations a second of ``device`` in matrix multiplications of a precision such as ``"bf16-mixed"``.

    ``None``: not known, which is always so on a CPU, and for fp8, where only some multiplications are in 8 bits.
    """
    kind = {"64": "fp64", "32": "fp32", "16": "fp16", "bf16": "bf16"}.get(precision.partition("-")[0])
    if kind == "fp32" and Device(device).tf32:
        kind = "tf32"
    return None if kind is None else known_peak(Device(device).name, kind)
