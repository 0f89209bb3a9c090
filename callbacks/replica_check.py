"""Checks that the ranks still have equal parameters, bit for bit."""

from __future__ import annotations

import fnmatch
import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine import Callback, CheckError, Run

_log = logging.getLogger("engine")

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22
"""Elements hashed at a time: 32 MiB for each intermediate result."""
_MULTIPLIER = 6364136223846793004
"""Even, so that ``1 + _MULTIPLIER * position`` is odd: an odd factor modulo 2**64 maps different numbers to different ones."""


class ReplicaCheck(Callback):
    """Compares replicas of parameters between ranks, every ``every_n_steps`` steps and at the end of the training.

    Replicas start equal and get the same updates, so they stay equal bit for bit. If they differ, a device has computed something wrong (silent
    data corruption), or the ranks run different code. The error, which all ranks raise, names the first parameter that differs, and the ranks
    whose value differs from that of most ranks. A parameter divided among ranks (FSDP, tensor parallel) is compared over the ranks with the same
    part of it, HSDP's replicas for example. A part that only one rank holds is not compared; if that is the whole model (FSDP without replicas,
    one process), the log says so once. Under DeepSpeed's stage 3, whose shards cannot be read, the callback raises an error.

    Each tensor is hashed on its device: the sum over its elements' bits, times an odd number that depends on the position, modulo 2**64.
    A change of one element always changes the hash. A check reads the parameters once, waits for the device, and shares 16 bytes a tensor.
    Between two checks a micro-batch costs one call.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        *,
        buffers: bool = False,
        ignore: Sequence[str] = (),
        on_mismatch: Literal["raise", "warn"] = "raise",
    ) -> None:
        """
        Args:
            every_n_steps: optimizer steps between two checks.
            buffers: compare buffers, too. Running statistics of batch norms differ between ranks, unless ``sync_batchnorm``.
            ignore: names of parameters and buffers that differ on purpose (experts of each rank); ``*`` matches any text.
            on_mismatch: ``"raise"`` :class:`engine.CheckError`, or ``"warn"`` at each check.

        Raises:
            TypeError: ``ignore`` is a string, not a list of names.
            ValueError: ``every_n_steps`` is below 1, or ``on_mismatch`` is unknown. Before the first step: a name in ``ignore`` matches nothing.
        """
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"ReplicaCheck(every_n_steps={every_n_steps!r}): it must be an int of at least 1")
        if on_mismatch not in ("raise", "warn"):
            raise ValueError(f"ReplicaCheck(on_mismatch={on_mismatch!r}): it must be 'raise' or 'warn'")
        if isinstance(ignore, str):
            raise TypeError(f"ReplicaCheck(ignore={ignore!r}): give a list of names, [{ignore!r}]")
        self.every_n_steps, self.buffers, self.on_mismatch = every_n_steps, buffers, on_mismatch
        self.ignore = tuple(ignore)
        self.checked_step = -1
        """The step after which replicas were compared last."""
        self._next = 0
        self._logged = False

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        strategy = run.engine.strategy
        if any(strategy.flat_range(parameter) is not None for parameter in module.parameters()):
            raise ValueError(
                f"ReplicaCheck cannot compare parameters that {type(strategy).__name__} shards without replicas: remove the callback, or "
                "shard only gradients and optimizer state (ZeRO stage 1 or 2)"
            )
        names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
        for pattern in self.ignore:
            if not fnmatch.filter(names, pattern):
                examples = ", ".join(names[:8])
                raise ValueError(
                    f"ReplicaCheck(ignore=[{pattern!r}]) matches no parameter or buffer; there are {examples}, ..."
                )
        self._logged, self.checked_step = False, -1
        self._next = (run.step // self.every_n_steps + 1) * self.every_n_steps

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if run.step >= self._next:
            self._next = (run.step // self.every_n_steps + 1) * self.every_n_steps
            self._check(run, module)

    def on_train_end(self, run: Run, module: nn.Module) -> None:
        if run.step != self.checked_step:
            self._check(run, module)

    def _check(self, run: Run, module: nn.Module) -> None:
        self.checked_step = run.step
        if run.world_size == 1:
            self._log_once("the run has one process, so nothing is compared")
            return
        named = [
            (name, tensor)
            for name, tensor in _tensors(module, self.buffers)
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignore)
        ]
        keys = torch.tensor([_part_key(name, tensor) for name, tensor in named], dtype=torch.int64)
        hashes = torch.stack([_hash(tensor) for _, tensor in named]).cpu() if named else keys  # waits for the device
        ranks = torch.full_like(keys, run.rank)
        gathered = run.engine.gather([keys, hashes, ranks])
        holders: dict[int, dict[int, int]] = {}  # key -> rank -> hash; a rank's parameters come in the model's order
        for key, value, rank in zip(*(column.tolist() for column in gathered), strict=True):
            holders.setdefault(key, {})[rank] = value
        if all(len(values) == 1 for values in holders.values()):
            self._log_once(
                f"under {type(run.engine.strategy).__name__} each rank has a different part of the model, so nothing is compared"
            )
        wrong = [key for key, values in holders.items() if len(set(values.values())) > 1]
        if not wrong:
            return
        first = wrong[0]
        local_name = next((name for key, (name, _) in zip(keys.tolist(), named, strict=True) if key == first), "")
        # Only one rank sends the name; ranks without this part do not know it.
        name_bytes = local_name.encode() if run.rank == min(holders[first]) else b""
        name = bytes(run.engine.gather(torch.tensor(list(name_bytes), dtype=torch.uint8)).tolist()).decode()
        message = _message(name, holders[first], len(wrong), len(holders), run.step)
        if self.on_mismatch == "raise":
            raise CheckError(message)
        if run.is_main_process:
            _log.warning(message)

    def _log_once(self, text: str) -> None:
        if not self._logged:
            _log.info("ReplicaCheck: %s", text)
            self._logged = True


def _tensors(module: nn.Module, buffers: bool) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and with ``buffers`` also buffers, that have values on this rank."""
    kinds = [module.named_parameters(), module.named_buffers()] if buffers else [module.named_parameters()]
    for named in kinds:
        for name, tensor in named:
            if not tensor.is_meta and not isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
                yield name, tensor


def _part_key(name: str, tensor: Tensor) -> int:
    """Return a number for the part of the tensor on this rank. It is equal on ranks with replicas of that part."""
    part = ""
    if isinstance(tensor, DTensor):
        where = list(tensor.device_mesh.get_coordinate() or ())
        part = str([(n, str(p)) for n, p in zip(where, tensor.placements, strict=True) if not p.is_replicate()])
    text = f"{name} {tensor.dtype} {list(tensor.shape)} {part}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


@torch.no_grad()
def _hash(tensor: Tensor) -> Tensor:
    """A hash of all bits of this rank's part, int64 with shape ``()``, on the device."""
    plain = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if hasattr(plain, "__tensor_flatten__"):
        inner, _ = plain.__tensor_flatten__()
        return torch.stack([_hash(getattr(plain, name)) * (2 * i + 1) for i, name in enumerate(inner)]).sum()
    flat = plain.contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        positions = torch.arange(start, start + part.numel(), device=bits.device)
        total += (part * (positions * _MULTIPLIER + 1)).sum()
    return total


def _message(name: str, values: dict[int, int], wrong: int, tensors: int, step: int) -> str:
    """Return the message about the first tensor that differs. ``values``: its hash by rank."""
    (common_value, count), *rarer_values = Counter(values.values()).most_common()
    odd = sorted(rank for rank, value in values.items() if value != common_value)
    if rarer_values and rarer_values[0][1] == count:  # no majority
        difference = f"its values differ between the ranks {', '.join(map(str, sorted(values)))}"
    else:
        of_the_ranks = f"of the {len(values)} ranks that hold it"
        difference = f"another value than most {of_the_ranks}: rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
    return (
        f"ReplicaCheck: replicas differ after step {step}. The first parameter is {name}: {difference}; {wrong} of {tensors} tensors differ. "
        "Replicas start equal and get equal updates: a device computes wrong results (test that machine, and resume from a checkpoint before "
        "this step), or a callback, hook or optimizer changes parameters on some ranks only"
    )
