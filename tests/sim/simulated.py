"""The simulated accelerator: importing this makes the device type ``"sim"`` known to this process, with two devices and ``torch.sim``.

It renames torch's ``privateuse1`` for the whole process, so it is imported by scenarios (processes of their own), never by pytest's process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import traceback
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from build_device import NAME, library


@dataclass(frozen=True)
class Wait:
    """A thread has stood still until the device was done.

    ``name`` is what made it wait (``item``, ``copy D2H``, ``event.synchronize`` ...), ``stack`` the places in Python, innermost first.
    """

    name: str
    thread: str
    stack: tuple[str, ...]

    @property
    def in_training(self) -> bool:
        """In the main thread or one of autograd's; a thread that somebody started in Python waits for itself only."""
        return self.thread == "MainThread" or self.thread.startswith("Dummy-")

    def __str__(self) -> str:
        return f"{self.name} in {self.thread}: {' < '.join(self.stack)}"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_device = _load()
_waits: list[Wait] = []


def _note_wait(name: str) -> None:
    frames = traceback.extract_stack()[:-1][::-1][:30]
    stack = tuple(f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno} {frame.name}" for frame in frames)
    _waits.append(Wait(name, threading.current_thread().name, stack))


_device.on_wait(_note_wait)


def races() -> list[str]:
    """Uses of memory by two streams, or by a stream and the host, that nothing puts in order."""
    return list(_device.races())


def waits() -> list[Wait]:
    """Waits of threads for the device, in order."""
    return list(_waits)


def training_waits() -> list[str]:
    """Those in the main thread and autograd's."""
    return [str(wait) for wait in _waits if wait.in_training]


def clear() -> None:
    """Forget races and waits."""
    _device.clear_races()
    _waits.clear()


def pinned_bytes() -> int:
    """Pinned memory of the host that is in use now (bytes)."""
    return int(_device.pinned_bytes())


def set_capacity(device: int, size: int) -> None:
    """How much memory a device has (bytes; 16 GiB at first)."""
    _device.set_capacity(device, size)


def _index(device: Any = None) -> int:
    if device is None or isinstance(device, int):
        return torch.accelerator.current_device_index() if device is None else device
    device = torch.device(device)
    return torch.accelerator.current_device_index() if device.index is None else device.index


# ---- the module that a vendor's package would bring ----


@contextlib.contextmanager
def _stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


def _generator(device: Any = None) -> torch.Generator:
    found: torch.Generator = _device.default_generator(_index(device))
    return found


def _module() -> types.ModuleType:
    accelerator, count = torch.accelerator, _device.DEVICES
    module = types.ModuleType(
        "torch.sim", "The simulated accelerator's module, as ``torch.get_device_module`` gives it."
    )
    vars(module).update(
        is_available=lambda: True,
        _lazy_init=lambda: (
            None
        ),  # without one torch before 2.13 takes the device for uninitialized, and synchronize() does nothing
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: count,
        current_device=accelerator.current_device_index,
        set_device=lambda device: accelerator.set_device_index(_index(device)),
        device=lambda device: accelerator.device_index(_index(device)),
        synchronize=accelerator.synchronize,
        get_device_name=lambda device=None: "Simulated accelerator",
        get_device_capability=lambda device=None: (1, 0),
        get_device_properties=lambda device=None: types.SimpleNamespace(
            name="Simulated accelerator", total_memory=_memory(device)[1]
        ),
        is_bf16_supported=lambda including_emulation=True: True,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    vars(module).update(
        Stream=torch.Stream,
        Event=torch.Event,
        stream=_stream,
        set_stream=accelerator.set_stream,
        current_stream=accelerator.current_stream,
        default_stream=lambda device=None: torch.Stream(stream_id=0, device_index=_index(device), device_type=20),
    )
    vars(module).update(
        memory_allocated=lambda device=None: accelerator.memory_allocated(_index(device)),
        max_memory_allocated=lambda device=None: accelerator.max_memory_allocated(_index(device)),
        memory_reserved=lambda device=None: accelerator.memory_reserved(_index(device)),
        max_memory_reserved=lambda device=None: accelerator.max_memory_reserved(_index(device)),
        reset_peak_memory_stats=lambda device=None: accelerator.reset_peak_memory_stats(_index(device)),
        memory_stats=lambda device=None: accelerator.memory_stats(_index(device)),
        mem_get_info=lambda device=None: _memory(device),
        empty_cache=accelerator.empty_cache,
    )
    vars(module).update(
        get_rng_state=lambda device=None: _generator(device).get_state(),
        set_rng_state=lambda state, device=None: _generator(device).set_state(state),
        get_rng_state_all=lambda: [_generator(index).get_state() for index in range(count)],
        set_rng_state_all=_set_rng_state_all,
        initial_seed=lambda: _generator().initial_seed(),
        seed=lambda: _generator().seed(),
        manual_seed=lambda seed: _generator().manual_seed(seed),
        manual_seed_all=_manual_seed_all,
    )
    return module


def _memory(device: Any = None) -> tuple[int, int]:
    free, total = torch.accelerator.get_memory_info(_index(device))
    return int(free), int(total)


def _set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        _generator(index).set_state(state)


def _manual_seed_all(seed: int) -> None:
    for index in range(_device.DEVICES):
        _generator(index).manual_seed(seed)


def _group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return _device.group(dist.ProcessGroupGloo(store, rank, size, timeout))


torch.utils.rename_privateuse1_backend("sim")
torch._register_device_module("sim", _module())
torch.utils.generate_methods_for_privateuse1_backend()
dist.Backend.register_backend("simccl", _group, devices=["sim"])
