"""Build the simulated accelerator's C++ once for each state of its source, torch and compiler, and keep it for later runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device")
NAME = "sim_device"


def compiler() -> str | None:
    """The C++ compiler: ``CXX``, or ``g++``. ``None`` if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def missing() -> str | None:
    """Why the device cannot be built here, or ``None``."""
    if compiler() is None:
        return "the simulated accelerator is built with g++ (or CXX), which is not installed"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"the simulated accelerator is built with Python's headers, which are not in {sysconfig.get_path('include')}"
    return None


def library() -> Path:
    """The shared library, built if it is not in the cache.

    Processes that need it at the same time build it once: the others wait for a lock that ends with the process that holds it. A
    finished library appears under its name at once; a build that was killed leaves nothing but a folder in ``/tmp``.

    Raises:
        RuntimeError: the compiler's messages.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "engine-tests"
    cache.mkdir(parents=True, exist_ok=True)
    found = cache / f"{NAME}-{_key()}.so"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            _build(found)
    return found


def _key() -> str:
    version = subprocess.run([str(compiler()), "--version"], capture_output=True, check=True).stdout
    parts = [
        version,
        torch.__version__.encode(),
        sysconfig.get_platform().encode(),
        sysconfig.get_python_version().encode(),
    ]
    parts += [" ".join(_command("", "")).encode(), *(path.read_bytes() for path in sorted(SOURCE.iterdir()))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _command(source: str, target: str) -> list[str]:
    torch_folder = Path(torch.__file__).parent
    include = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    flags = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-DTORCH_EXTENSION_NAME={NAME}"]
    libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    return [
        *(str(compiler()), "-O1", "-std=c++20", "-fPIC", "-shared", *flags, *(f"-I{folder}" for folder in include)),
        *(source, "-o", target, f"-L{torch_folder / 'lib'}", *libraries),
    ]


def _build(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / target.name
        ran = subprocess.run(_command(str(SOURCE / "sim.cpp"), str(made)), capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(f"the simulated accelerator does not build:\n{ran.stderr[-8000:]}")
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copy(made, beside)
        beside.replace(target)


if __name__ == "__main__":
    print(library())
