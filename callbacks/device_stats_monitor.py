"""Adds memory and utilization of device and processor to the logged metrics."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from engine import Callback, Device, Run


class DeviceStatsMonitor(Callback):
    """Adds memory and utilization to the logged metrics of the training, each as its maximum over all ranks:

    ============================================  ====================================================================
    ``device/allocated_bytes``, ``reserved_...``  memory of tensors now, and held by torch's allocator (an accelerator)
    ``device/max_allocated_bytes``                the most since the process started (an accelerator)
    ``device/utilization_percent``                share of the last second or so in which a kernel ran (if the device reports it)
    ``cpu/rss_bytes``                             resident memory of the process
    ``cpu/process_percent``                       processor time of the process since the last boundary; 200: two cores
    ``cpu/percent``, ``cpu/memory_percent``       of the whole machine (with ``psutil``), read at most once a second
    ============================================  ====================================================================

    The rank with the largest value is the one that runs out of memory. Values are read at log boundaries, where the ranks share them in one
    collective; so an error in this callback ends the run. A value that cannot be read is left out. Between two boundaries nothing is
    measured, and the device does not wait: ``max_allocated_bytes`` has the peak of memory.
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        """
        Args:
            cpu_stats: whether to log the ``cpu/`` values. ``None``: only when training on the CPU. ``True`` needs ``psutil``, as in
                Lightning; with ``None``, values that need it are left out if it is missing.

        Raises:
            ModuleNotFoundError: ``cpu_stats=True`` without ``psutil``.
        """
        if cpu_stats and importlib.util.find_spec("psutil") is None:
            raise ModuleNotFoundError(
                "DeviceStatsMonitor(cpu_stats=True) needs psutil: pip install psutil, or leave cpu_stats out"
            )
        self.cpu_stats = cpu_stats
        self._readers: dict[str, Callable[[], float]] = {}
        self._training = False
        self._clock = (0.0, 0.0)
        self._step = -1

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        self._readers = _accelerator_readers(run.device)
        if self.cpu_stats or (self.cpu_stats is None and run.device.type == "cpu"):
            self._readers |= {"cpu/process_percent": self._process_percent, **_processor_readers()}
        self._clock = (time.perf_counter(), time.process_time())
        self._training, self._step = True, -1

    # An evaluation's metrics are logged between these two hooks.
    def on_validation_start(self, run: Run, module: nn.Module) -> None:
        self._training = False

    def on_validation_end(self, run: Run, module: nn.Module) -> None:
        self._training = bool(self._readers)

    def on_train_end(self, run: Run, module: nn.Module) -> None:
        self._training, self._readers = False, {}

    def on_before_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        if not self._training or step == self._step:
            return
        self._step = step
        values = torch.tensor([_read(reader) for reader in self._readers.values()], dtype=torch.float64)
        largest = run.engine.reduce(values, "max").tolist()
        metrics.update({name: value for name, value in zip(self._readers, largest, strict=True) if value >= 0})

    def _process_percent(self) -> float:
        wall, used = time.perf_counter(), time.process_time()
        (before, used_before), self._clock = self._clock, (wall, used)
        return 100 * (used - used_before) / max(wall - before, 1e-9)


def _read(reader: Callable[[], float]) -> float:
    """Return the value, or -1 if it cannot be read."""
    try:
        return float(reader())
    except Exception:  # drivers and psutil have many kinds of errors, and none of them is a reason to end a run
        return -1.0


class _CachedReader:
    """Reads a value of the whole machine at most once a second: it takes 0.2 ms, and a percentage of less than 0.1 s of time means nothing."""

    def __init__(self, reader: Callable[[], float]) -> None:
        self._reader, self._value, self._next = reader, -1.0, 0.0

    def __call__(self) -> float:
        if (now := time.monotonic()) >= self._next:
            self._value, self._next = self._reader(), now + 1.0
        return self._value


# Every rank has the same readers, whatever is installed on its machine, since all ranks must share equally many values.
def _accelerator_readers(device: torch.device) -> dict[str, Callable[[], float]]:
    if device.type == "cpu":
        return {}
    statistics = Device(device)
    readers: dict[str, Callable[[], float]] = {
        f"device/{kind}_bytes": partial(_device_bytes, statistics, kind)
        for kind in ("allocated", "reserved", "max_allocated")
    }
    readers["device/utilization_percent"] = _CachedReader(partial(_device_utilization, statistics))
    return readers


def _device_bytes(statistics: Device, kind: str) -> float:
    return statistics.memory().get(kind, -1)


def _device_utilization(statistics: Device) -> float:
    percent = statistics.utilization()
    return -1.0 if percent is None else percent


def _processor_readers() -> dict[str, Callable[[], float]]:
    readers: dict[str, Callable[[], float]] = {
        "cpu/rss_bytes": _resident_bytes,
        "cpu/percent": _not_available,
        "cpu/memory_percent": _not_available,
    }
    if importlib.util.find_spec("psutil") is not None:
        psutil = importlib.import_module("psutil")

        psutil.cpu_percent()  # later calls give the time since the call before
        readers["cpu/percent"] = _CachedReader(psutil.cpu_percent)
        readers["cpu/memory_percent"] = _CachedReader(lambda: psutil.virtual_memory().percent)
    return readers


def _not_available() -> float:
    return -1.0


def _resident_bytes() -> float:
    """Resident memory in bytes; where the system does not report it, the peak so far."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        resource = importlib.import_module("resource")  # not on Windows
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
