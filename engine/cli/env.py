"""``fit env``: the versions, devices, environment and settings that a run started here would have."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from engine import strategies
from engine.cli.main import version
from engine.cli.terminal import show, table
from engine.config.masked import table_rows, with_origins
from engine.config.resolve import SECTIONS, resolve
from engine.distributed.environments import detect, hints
from engine.utils import accelerator, cuda
from engine.utils.device import Device
from engine.utils.device_names import BF16_REMEDY, bf16_ends_the_process

_PACKAGES = (
    *("fit-trainer", "torch", "torchmetrics", "safetensors", "numpy", "rich", "pyyaml"),
    *("deepspeed", "tensorboard"),
)


def run(options: argparse.Namespace) -> int:
    """Print the report.

    Returns:
        0, or 1 when the settings or the environment would make a run fail; the report then says why.
    """
    report = collect(os.environ)
    show(json.dumps(report, indent=2) if options.json else as_text(report))
    return 1 if report["errors"] else 0


def collect(environ: Mapping[str, str]) -> dict[str, Any]:
    """The report as JSON values.

    Returns:
        ``versions`` (name -> version or ``None``), ``devices``, ``environment`` (as detected, or ``None``), ``variables`` (those it
        was read from), ``hints`` (lines about it), ``settings`` (name -> ``value`` and ``origin``, as in ``run.config``) and ``errors``
        (what makes environment or settings fail).
    """
    bf16_faulty = bf16_ends_the_process()
    report: dict[str, Any] = {
        "versions": {"python": f"{platform.python_version()} ({platform.platform()})"}
        | {name: version(name) for name in _PACKAGES},
        "devices": _devices(bf16_faulty),
        "environment": None,
        "variables": {},
        "hints": [BF16_REMEDY] if bf16_faulty else [],
        "settings": {},
        "errors": [],
    }
    try:
        environment = detect(environ)
        report["environment"] = asdict(environment)
        report["variables"] = report["environment"].pop("variables")
        report["hints"] += hints(environ, environment)
    except (ValueError, RuntimeError) as error:
        report["errors"].append(str(error))
    try:
        resolved = resolve({}, environ, sections=SECTIONS)
    except (ValueError, TypeError, OSError) as error:
        report["errors"].append(str(error))
    else:
        report["settings"] = with_origins(resolved.settings, resolved.origins)
        try:
            precision, strategy = strategies.requested(resolved.settings, resolved.origins)
        except (ValueError, TypeError, OSError) as error:
            report["errors"].append(str(error))
        else:
            objects = strategies.describe_requested(resolved.settings, precision, strategy)
            report["settings"] = with_origins(resolved.settings, resolved.origins, objects)
    return report


def as_text(report: Mapping[str, Any]) -> str:
    """The report of :func:`collect` as text, with one value per line and the origin of each setting."""
    lines = [
        *_section("versions", {name: installed or "not installed" for name, installed in report["versions"].items()})
    ]
    lines += _section("devices", report["devices"])
    lines += _section("environment", report["environment"] or {})
    if report["variables"]:
        lines += _section("read from", report["variables"])
    if report["hints"]:
        lines += [*(f"hint: {hint}" for hint in report["hints"]), ""]
    lines += ["settings", *("  " + line for line in table(table_rows(report["settings"]))), ""]
    return "\n".join([*lines, *(f"error: {error}" for error in report["errors"])]).rstrip()


def _section(title: str, values: Mapping[str, Any]) -> list[str]:
    width = max(map(len, values), default=0)
    return [title, *(f"  {name:<{width}}  {value}" for name, value in values.items()), ""]


def _devices(bf16_faulty: bool) -> dict[str, str]:
    """The devices of this machine and what they can do. If ``bf16_faulty``, the CPU is not tried: a product in bf16 would end this process."""
    import torch
    import torch.distributed as dist

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = {"cpu": f"{cores} cores, {torch.get_num_threads()} threads in an operation"}
    kind = accelerator.present()
    lines["accelerator"] = accelerator.machine(kind)
    if cuda.toolkit():
        lines["built for"] = cuda.toolkit()
    if kind is not None:
        for index in range(accelerator.devices(kind)):
            lines[f"{kind}:{index}"] = Device(torch.device(kind, index)).described()
    device = torch.device(kind or "cpu")
    if not bf16_faulty or device.type != "cpu":
        capabilities = accelerator.capabilities(device)
        lines[f"{device.type} has"] = ", ".join(name for name, is_supported in capabilities.items() if is_supported)
        lacks = [name for name, is_supported in capabilities.items() if not is_supported]
        lines[f"{device.type} lacks"] = ", ".join(lacks) or "nothing of these"
    lines["float32 products"] = cuda.products()[0] or "set for each device by itself (torch.backends.*.fp32_precision)"
    if dist.is_available():
        backends = [
            name
            for name in dist.Backend.backend_list
            if name not in ("undefined", "fake") and dist.is_backend_available(name)
        ]
        lines["backends"] = ", ".join(backends) or "none"
        try:
            lines["collectives"] = f"{accelerator.collectives_backend(device)} for {device.type}"
        except RuntimeError as error:
            lines["collectives"] = str(error)
    return lines
