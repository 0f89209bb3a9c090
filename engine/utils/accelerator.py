"""The device that a process computes on: which one, and what it can do.

All questions about devices are answered here. This module uses only ``torch.accelerator`` and the device's module (``torch.cuda``,
``torch.mps``, ...), so that a device that a package adds to torch is like any other. Capabilities are tried on the device,
never guessed from its name: each is tried once in a process, with tensors of a few bytes, and waits for the device.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from engine.utils import torch_private
from engine.utils.device_names import KNOWN, device_hint, hidden_by, is_added
from engine.utils.errors import nearest

_hidden = False


def show_only_cpu() -> None:
    """Hide the accelerator from this process from now on, for a rank of ``launch.debug``."""
    global _hidden
    _hidden = True


def present() -> str | None:
    """The type of the accelerator that ``torch.accelerator`` finds on this machine; ``None`` if there is only the CPU."""
    accelerator = None if _hidden else torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def device_type(accelerator: str) -> str:
    """The type of device that ``accelerator=`` names: ``"cpu"``, ``"cuda"``, ``"mps"``, ...

    ``"auto"`` is the accelerator that ``torch.accelerator`` finds, or else the CPU; ``"gpu"`` is that accelerator, of whatever kind.

    Raises:
        ValueError: unknown name.
        RuntimeError: the machine does not have this accelerator.
    """
    if accelerator not in KNOWN and not is_added(accelerator):
        raise ValueError(
            f"accelerator={accelerator!r} is unknown{device_hint(accelerator) or nearest(accelerator, KNOWN)}; possible: {', '.join(KNOWN)}, "
            "and devices that a package adds to torch, once it is imported"
        )
    if accelerator == "cpu":
        return "cpu"
    available = present()
    if accelerator == "auto":
        return available or "cpu"
    if available is None or accelerator not in ("gpu", available):
        alternative = " or 'gpu'" if available else ""
        raise RuntimeError(
            f"accelerator={accelerator!r} was requested, but {machine(available)}; use {(available or 'cpu')!r}{alternative} or 'auto'"
        )
    return available


def machine(kind: str | None) -> str:
    """A clause for messages: the devices that torch sees on this machine, whose accelerator is of ``kind``."""
    if kind is not None:
        return f"torch {torch.__version__} sees {devices(kind)} {kind} device(s) on this machine"
    built = torch.accelerator.current_accelerator()
    if built is None:
        return f"torch {torch.__version__} was built without accelerators and sees only the CPU"
    return (
        f"torch {torch.__version__} (built for {built.type}) sees only the CPU on this machine{hidden_by(built.type)}"
    )


def module(device: torch.device | str) -> Any:
    """The device's module: ``torch.cuda``, ``torch.mps``, ...

    Raises:
        RuntimeError: torch has no such device.
    """
    return torch.get_device_module(device)


def devices(kind: str) -> int:
    """The number of devices of a kind that this process sees; initialises them only if the driver cannot be asked otherwise."""
    return 1 if kind == "cpu" else int(module(kind).device_count())


_IN_USE = 255
"""The exit status of a fork that cannot use the devices, because its parent process has started the driver."""


def devices_of_forks() -> int | None:
    """The number of devices that a fork of this process could use; ``None``: it could not use any, because this process has started the driver.

    The devices are counted in a fork: counting starts CUDA's driver (``torch.cuda.is_available()``, or a count without NVML), and
    forks of a process in which the driver has started cannot use it.
    """
    built = torch.accelerator.current_accelerator()
    if built is None:
        return 0
    child = os.fork()
    if not child:
        answer = 0
        with suppress(Exception):
            owner = module(built)
            is_in_use = torch_private.is_after_fork(owner)
            answer = _IN_USE if is_in_use else min(owner.device_count(), _IN_USE - 1)
        os._exit(answer)
    answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if answer < 0:  # some systems kill a fork that asks for the device
        return devices(built.type)
    return None if answer == _IN_USE else answer


def count(kind: str, requested: int | str) -> int:
    """The number of processes that a machine runs for ``devices=requested``; ``"auto"``: one for every device, or one on a CPU.

    Raises:
        ValueError: more devices are requested than the machine has.
    """
    if kind == "cpu":
        return 1 if requested in ("auto", -1) else int(requested)
    available = devices(kind)
    if requested in ("auto", -1):
        return available or 1
    if int(requested) > available:
        raise ValueError(
            f"devices={requested} was requested, but this machine has {available} {kind} device(s){hidden_by(kind)}"
        )
    return int(requested)


def device(kind: str, index: int, *, binds_devices: bool = False) -> torch.device:
    """The device of a local rank, which is made torch's current device.

    Args:
        kind: the type of device, as :func:`device_type` returns it.
        index: the local rank, or the requested device.
        binds_devices: whether the launcher may hide other processes' devices; then a single visible device is this process's, whatever its index.

    Raises:
        ValueError: the local rank has no device.
    """
    if kind == "cpu":
        return torch.device("cpu")
    index = visible_index(index, devices(kind), binds_devices, kind)
    torch.accelerator.set_device_index(index)
    result = torch.device(kind, index)
    # Steps use these capabilities later; they are tried now, because a trial waits for the device.
    wide(result), defers(result), has_streams(result)
    return result


def visible_index(index: int, visible: int, binds_devices: bool, kind: str = "cuda") -> int:
    """The index of a process's device among the ``visible`` ones; for ``binds_devices`` and errors see :func:`device`."""
    if binds_devices and visible == 1:
        return 0
    if index >= visible:
        raise ValueError(
            f"local rank {index} has no device: this process sees {visible} {kind} device(s){hidden_by(kind)}. Start fewer processes per node"
        )
    return index


def model_name(device: torch.device) -> str:
    """The vendor's name of the device, such as ``"NVIDIA H100 80GB HBM3"``; the device's type if torch does not know a name."""
    get_name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    if get_name is not None:
        return str(get_name(device))
    get_name = getattr(getattr(torch.backends, device.type, None), "get_name", None)  # MPS
    return str(get_name()) if get_name is not None else device.type


def name(device: torch.device) -> str:
    """The device as messages name it: ``"cuda:0 (NVIDIA H100 80GB HBM3)"``, or ``"cpu"`` if torch does not know a name."""
    model = model_name(device)
    return str(device) if model == device.type else f"{device} ({model})"


def current_stream(device: torch.device) -> torch.Stream:
    """The stream on which the device computes."""
    return torch.accelerator.current_stream(device)


def empty_cache(device: torch.device) -> None:
    """Return the allocator's cached memory to the device; does nothing on a CPU."""
    if device.type != "cpu":
        # torch.accelerator.empty_cache() needs torch's common allocator, which not every device has: MPS has its own.
        getattr(module(device), "empty_cache", torch.accelerator.empty_cache)()


def in_use() -> str | None:
    """The type of the accelerator that this process has initialised, or ``None``. Does not initialise one."""
    built = torch.accelerator.current_accelerator()
    if built is None:
        return None
    owner = module(built)
    # MPS has no `is_initialized`; an available device counts as used there.
    used = owner.is_initialized() if hasattr(owner, "is_initialized") else owner.is_available()
    return built.type if used else None


# -- what a device can do -----------------------------------------------------------------------------------------------------------------


def _returns_true(attempt: Callable[[], Any]) -> bool:
    """Whether a trial on a device returns a true value without an error."""
    with suppress(RuntimeError, TypeError, ValueError, AssertionError, AttributeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # autocast only warns about dtypes that it does not support
        try:
            return bool(attempt())
        except torch.OutOfMemoryError as error:  # not an answer about the device, so it must not be cached
            raise MemoryError(f"no memory is left to try what the device can do: {error}") from error
    return False


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Whether the device can queue work on a second stream, beside the one that computes."""

    def attempt() -> bool:
        with torch.Stream(device):
            return True

    return device.type != "cpu" and _returns_true(attempt)


@functools.cache
def has_events(device: torch.device) -> bool:
    """Whether the host can wait for a point in the device's queue of work (an event)."""

    def attempt() -> bool:
        event = torch.Event(device)
        event.record()
        event.synchronize()
        return True

    return device.type != "cpu" and _returns_true(attempt)


@functools.cache
def pins(device: torch.device) -> bool:
    """Whether host memory can be pinned for the device, so that copies do not block the host."""
    return device.type != "cpu" and _returns_true(lambda: torch.empty(1, pin_memory=True).is_pinned())


@functools.cache
def computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies matrices of this dtype."""

    def attempt() -> bool:
        matrix = torch.ones(2, 2, dtype=dtype, device=device)
        return (matrix @ matrix).numel() == 4

    return _returns_true(attempt)


def supports_float64(device: torch.device) -> bool:
    """Whether the device has float64 (MPS does not)."""
    return computes_in(device, torch.float64)


@functools.cache  # a cached answer costs steps no call of a Python function
def wide(device: torch.device) -> torch.dtype:
    """The widest real dtype of the device: float64, or float32 on devices without."""
    # A CPU is not tried: modes that count a step's operations would count the trial, too.
    return torch.float64 if device.type in ("cpu", "meta") or supports_float64(device) else torch.float32


def supports_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16, even if by emulation."""
    return computes_in(device, torch.bfloat16)


@functools.cache
def autocasts_to(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``torch.autocast`` computes in this dtype on the device. If not, torch only warns and computes in fp32."""

    def attempt() -> bool:
        matrix = torch.ones(2, 2, device=device)
        with torch.autocast(device.type, dtype=dtype):
            product = matrix @ matrix
        return product.dtype == dtype and bool(product.float().sum().item() == 4 * 2)

    return _returns_true(attempt)


@functools.cache
def scales_losses(device: torch.device) -> bool:
    """Whether the device has the kernels of ``torch.amp.GradScaler``, which fp16 needs."""

    def attempt() -> bool:
        gradients = [torch.full((2,), 8.0, device=device), torch.full((2,), torch.inf, device=device)]
        found_inf, inverse = torch.zeros(1, device=device), torch.full((1,), 0.5, device=device)
        torch_private.unscale(gradients, found_inf, inverse)
        scale, tracker = torch.full((1,), 8.0, device=device), torch.zeros(1, dtype=torch.int32, device=device)
        torch_private.update_scale(scale, tracker, found_inf, 2.0, 0.5, 2000)
        return gradients[0].tolist() == [4.0, 4.0] and scale.item() == 4.0

    return _returns_true(attempt)


def defers(device: torch.device) -> bool:
    """Whether the device can copy a number to the host without making the host wait, to be read later."""
    return has_events(device) and pins(device)


def skips_steps(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step accepts ``found_inf`` and ``grad_scale`` on the device, as torch's fused optimizers do.

    Other packages' optimizers are trusted. Torch's claim support even where their kernel ignores both, so the device is asked.
    """
    if not torch_private.takes_amp_scaling(optimizer):
        return False
    torch_base = next((base for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim.")), None)
    parameter = next((p for group in optimizer.param_groups for p in group["params"]), None)
    if torch_base in (None, Optimizer) or parameter is None or parameter.device.type == "cpu":
        return True
    return fused_skips(parameter.device, torch_base)


@functools.cache
def fused_skips(device: torch.device, optimizer: type[torch.optim.Optimizer]) -> bool:
    """Whether this optimizer of torch has a fused kernel for the device that reads ``found_inf`` and ``grad_scale``.

    Such a kernel skips a step, and divides gradients, without making the host wait. Some kernels silently ignore both.
    """

    def weights(*steps: tuple[float, float, float | None]) -> list[float]:
        """Weights of 1 after steps with these gradients, ``found_inf`` and ``grad_scale`` (``None``: neither of the two is set)."""
        weight = torch.ones(2, device=device, requires_grad=True)
        stepper: Any = optimizer([weight], lr=0.5, fused=True)  # type: ignore[call-arg]
        for gradient, found_inf, scale in steps:
            weight.grad = torch.full_like(weight, gradient)
            if scale is not None:
                stepper.found_inf, stepper.grad_scale = (torch.full((), x, device=device) for x in (found_inf, scale))
            stepper.step()
        stepped: list[float] = weight.tolist()
        return stepped

    def obeys_both() -> bool:
        # With found_inf the weights must not move. Gradients that were multiplied by grad_scale must move them as plain ones do; the scales of
        # the two steps differ, because Adam's weights do not depend on a constant scale.
        plain, scaled = weights((1.0, 0.0, None), (3.0, 0.0, None)), weights((2.0, 0.0, 2.0), (12.0, 0.0, 4.0))
        return weights((1.0, 1.0, 1.0)) == [1.0, 1.0] and abs(plain[0] - scaled[0]) < 1e-5 and plain != [1.0, 1.0]

    return _returns_true(obeys_both)


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Whether the device has hardware for matrix products in fp8: NVIDIA from compute capability 8.9 on, AMD's gfx94x, gfx95x and gfx12, ...

    torch's fp8 product refuses every other device, except the CPU, which computes it in a wider dtype.
    """

    def attempt(dtype: torch.dtype) -> bool:
        matrix, scale = torch.ones(16, 16, device=device).to(dtype), torch.ones((), device=device)
        product = torch_private.fp8_product(matrix, matrix.t(), scale)
        return bool((product == 16).all())

    # gfx94x has only the second of these dtypes.
    formats = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    return device.type != "cpu" and any(_returns_true(functools.partial(attempt, fp8)) for fp8 in formats)


def capabilities(device: torch.device) -> dict[str, bool]:
    """The capabilities that ``fit env`` shows: name -> whether the device has it."""
    return {
        "float64": supports_float64(device),
        "bf16": supports_bf16(device),
        "bf16-mixed": autocasts_to(device, torch.bfloat16),
        "16-mixed": autocasts_to(device, torch.float16) and scales_losses(device),
        "fp8": has_fp8(device),
        "streams": has_streams(device),
        "pinned memory": pins(device),
        "fused AdamW": fused_skips(device, torch.optim.AdamW),
    }


def collectives_backend(device: torch.device) -> str:
    """The back end of process groups for the device's tensors: ``"nccl"``, ``"xccl"``, ``"gloo"``, ...

    Raises:
        RuntimeError: torch has no back end for the device.
    """
    try:
        return str(dist.get_default_backend_for_device(device))
    except ValueError:
        raise RuntimeError(
            f"{name(device)} has no back end for collectives in torch {torch.__version__}, so that several ranks cannot train on it; "
            "import the package that registers one (torch.distributed.Backend.register_backend(..., devices=...)), or use devices=1"
        ) from None
