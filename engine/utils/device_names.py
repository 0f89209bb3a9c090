"""Facts about devices that need no import of torch: names, for the launcher and shell completion, and a fault of some machines' bf16."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

KNOWN = ("auto", "cpu", "gpu", "cuda", "mps", "xpu", "npu", "hpu", "mtia")
"""Names that ``accelerator=`` accepts, besides the name of a device that a package adds to torch (``privateuse1``).

``gpu`` is any accelerator that ``torch.accelerator`` finds, even an NPU or an HPU.
"""
_HINTS = {
    "rocm": "torch calls ROCm's GPUs 'cuda'",
    "hip": "torch calls ROCm's GPUs 'cuda'",
    "nvidia": "it is called 'cuda'",
    "amd": "torch calls ROCm's GPUs 'cuda'",
    "metal": "it is called 'mps'",
    "intel": "it is called 'xpu'",
    "gaudi": "it is called 'hpu'",
    "ascend": "it is called 'npu'",
    "tpu": "torch.accelerator has no TPU",
    "xla": "torch.accelerator has no XLA device",
}
_HIDING = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
    "hpu": ("HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_DEVICES"),
}


BF16_REMEDY = (
    "matrix products in bf16 end a process on this CPU (SIGILL): the processor offers AMX and the machine does not allow it. "
    "Set ONEDNN_MAX_CPU_ISA=AVX2 in the environment, before Python starts"
)
_CPUINFO = Path("/proc/cpuinfo")
_BF16_PRODUCT = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); a @ a"


def device_hint(name: str) -> str:
    """A hint what to write instead of an unknown device name; may be empty."""
    kind, _, index = name.partition(":")
    if index.isdecimal() and kind in KNOWN:
        return f"; the index is a setting of its own: accelerator={kind!r}, devices=[{index}]"
    return f"; {_HINTS[kind]}" if kind in _HINTS else ""


def is_added(name: str) -> bool:
    """Whether a package has added a device of this name to torch (``privateuse1``). Imports torch and the packages that it loads."""
    import torch

    return name == torch.device("privateuseone").type  # the name that the package gave it


def hidden_by(kind: str) -> str:
    """The variables that are set and hide devices of this kind, as `` (CUDA_VISIBLE_DEVICES='5')``; may be empty."""
    variables = [f"{name}={os.environ[name]!r}" for name in _HIDING.get(kind, ()) if name in os.environ]
    return f" ({', '.join(variables)})" if variables else ""


def bf16_ends_the_process() -> bool:
    """Whether a matrix product in bf16 on the CPU kills the process that computes it. If the processor has AMX, a child process tries."""
    if not _CPUINFO.exists() or " amx_" not in _CPUINFO.read_text():
        return False
    # -P: do not import a torch.py in the current directory
    ended = subprocess.run([sys.executable, "-P", "-c", _BF16_PRODUCT], capture_output=True, check=False)
    return ended.returncode == -signal.SIGILL
