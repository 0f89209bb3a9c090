"""Numbers of a plan as text, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CATEGORIES = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "temporaries": "temporaries",
    "communication": "communication buffers",
    "inputs": "inputs",
}
"""The keys of :class:`engine.planning.rank_trace.Memory`, and what they are called."""
MARGINS = {
    "rounding": "the allocator's rounding",
    "unused": "free between blocks",
    "margin": "margin: workspaces",
    "context": "margin: context, kernels",
    "communicators": "margin: communicators' buffers",
}


def size(value: float) -> str:
    """Bytes: ``"1.50 GiB"``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f} B"


def count(value: float) -> str:
    """A large number: ``"8.03 B"`` is 8.03 billion."""
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f}"


def plural(value: float, word: str) -> str:
    """``"1 node"``, ``"2 nodes"``, ``"58.8 epochs"``."""
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return f"{text} {word}" if text == "1" else f"{text} {word}s"


def money(value: float) -> str:
    """``"1,234.50"``; small amounts keep two digits."""
    return f"{value:,.2f}" if value >= 1 or not value else f"{value:.2g}"


def duration(value: float | None) -> str:
    """Seconds: ``"1.20 ms"``, ``"3.4 h"``."""
    if value is None:
        return "not known"
    for unit, scale in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if value >= scale * (2 if scale >= 60 else 1):
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def need_rows(need: Mapping[str, Any], memory: Mapping[str, int]) -> list[tuple[str, int]]:
    """What adds up to a rank's need: categories at the peak, rounding, margins."""
    rows = [(title, memory[key]) for key, title in CATEGORIES.items() if memory.get(key)]
    parts = {"rounding": need["rounded"] - need["tensors"], "unused": need["reserved"] - need["rounded"], **need}
    return rows + [(title, parts[key]) for key, title in MARGINS.items() if parts[key]]


def title(plan: Mapping[str, Any]) -> str:
    """``"FSDP on 64 x h100 (8 nodes of 8)"``."""
    job, device = plan["job"], plan["device"]
    nodes = job["nodes"]
    axes = " x ".join(f"{name}={ranks}" for name, ranks in job["axes"].items())
    return (
        f"{job['strategy']}{f' ({axes})' if axes else ''} in {job['precision']} on {job['world_size']} x {device['name']}, "
        f"{plural(nodes, 'node')} of {job['world_size'] // nodes}"
    )


def verdict(plan: Mapping[str, Any]) -> str:
    """Whether it fits, in a sentence."""
    memory = plan["memory"]
    given = f"needs {size(memory['need_bytes'])} of {size(memory['device_bytes'])} on rank {plan['worst_rank']}"
    return {
        "yes": f"It fits: it {given}, margins included.",
        "no": f"It does not fit: it {given}.",
    }.get(plan["verdict"], f"It fits only without the margins: with them it {given}.")


def place(moment: Mapping[str, Any]) -> str:
    """Where the peak is."""
    module = f" in {moment['module']}" if moment["module"] else ""
    return f"{moment['phase']}{module}"


def time_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of one step."""
    time = plan["time"]
    worst = next(each for each in plan["ranks"] if each["step_s"] == max(rank["step_s"] for rank in plan["ranks"]))
    compute = worst["compute"]
    between = f", between {duration(time['best_s'])} (all communication hidden) and {duration(time['worst_s'])} (none)"
    rows = [
        ("step", duration(time["step_s"]) + (between if plan["job"]["world_size"] > 1 else "")),
        (
            "compute",
            f"{duration(time['compute_s'])}: {duration(compute['arithmetic_s'])} bound by arithmetic, {duration(compute['memory_s'])} by memory, "
            f"{duration(compute['dispatch_s'])} by the host",
        ),
        (
            "FLOPs of a rank",
            f"{count(compute['flops'])} a step, {compute['arithmetic_intensity']:.3g} for each byte of memory traffic",
        ),
    ]
    if plan["job"]["world_size"] > 1:
        rows.append(
            (
                "communication",
                f"{duration(time['communication_s'])}, {duration(time['exposed_communication_s'])} of it not hidden",
            )
        )
    if plan["job"]["schedule"]:
        rows.append(
            (
                "pipeline",
                f"{plan['job']['schedule']}, {plan['job']['parts']} parts: {time['bubble_fraction']:.1%} bubble, {duration(time['bubble_s'])}",
            )
        )
    rows.append(("MFU", f"{time['mfu']:.1%}; at most {time['mfu_bound']:.1%}"))
    tokens = time["tokens_per_second"]
    more = f", {count(tokens)} tokens/s ({count(tokens / plan['job']['world_size'])} for each device)" if tokens else ""
    rows.append(("throughput", f"{count(time['samples_per_second'])} samples/s{more}"))
    return rows


def run_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Data, checkpoints and money."""
    data, checkpoint, cost, job = plan["data"], plan["checkpoint"], plan["cost"], plan["job"]
    rows = [
        ("model", f"{count(job['parameters'])} parameters, {count(job['trainable'])} trained"),
        (
            "samples",
            f"{data['samples_per_rank_and_step']} a step and rank, {data['samples_per_step']} a step over {plural(job['data_ranks'], 'data rank')}",
        ),
    ]
    if data["samples_per_epoch"]:
        rows.append(
            ("epoch", f"{plural(data['samples_per_epoch'], 'sample')}, {plural(data['steps_per_epoch'], 'step')}")
        )
    if data["steps"]:
        epochs = f", {plural(data['epochs'], 'epoch')}" if data["epochs"] else ""
        rows.append(("training", f"{plural(data['steps'], 'step')}{epochs}: {duration(data['seconds'])}"))
    seconds = f", {duration(checkpoint['seconds'])} to write" if checkpoint["seconds"] is not None else ""
    copies = f"{size(checkpoint['copy_bytes'])} of the host's memory on each rank while it is written in the background"
    rows.append(
        ("checkpoint", f"{size(checkpoint['bytes'])} in at most {checkpoint['files']} files{seconds}; {copies}")
    )
    if cost["price_per_device_hour"] is not None:
        total = f", {money(cost['total'])} for the training" if cost["total"] is not None else ""
        rows.append(("cost", f"{money(cost['per_1000_steps'])} for 1000 steps{total}"))
    return rows


def check_rows(plan: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Formulas that differ from the trace: what, traced, formula, source."""
    show = {"activations": size}
    rows = []
    for each in plan["checks"]:
        if each["differs"]:
            text = show.get(each["what"], count)
            rows.append((each["what"], text(each["traced"]), text(each["formula"]), each["source"]))
    return rows


def agreeing(plan: Mapping[str, Any]) -> str:
    """A sentence on the formulas that agree, or that there are none."""
    if not plan["checks"]:
        return "No cross-check by published formulas: the shape of a dense transformer cannot be read from the model."
    same = [each["what"] for each in plan["checks"] if not each["differs"]]
    return f"Published formulas agree within 20 % on: {', '.join(same)}." if same else ""
