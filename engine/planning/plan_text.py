"""Plans and searches as text: numbers and rows that the terminal and the page share, and the terminal's tables."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from engine.utils.text import terminal_text

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
"""Titles of the fields of :class:`engine.planning.rank_trace.Memory`."""
MARGINS = {
    "rounding": "the allocator's rounding",
    "unused": "free between blocks",
    "margin": "margin: workspaces",
    "context": "margin: context, kernels",
    "communicators": "margin: communicators' buffers",
}


def size(value: float) -> str:
    """Format a number of bytes as text, such as ``"1.50 GiB"``."""
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
    """Return a number with its noun: ``"1 node"``, ``"2 nodes"``, ``"58.8 epochs"``."""
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return f"{text} {word}" if text == "1" else f"{text} {word}s"


def money(value: float) -> str:
    """Return an amount of money without its currency: ``"1,234.50"``; below 1 with two significant digits, as ``"0.0042"``."""
    return f"{value:,.2f}" if value >= 1 or not value else f"{value:.2g}"


def duration(value: float | None) -> str:
    """Return a number of seconds as text with a fitting unit: ``"1.2 ms"``, ``"3.4 h"``."""
    if value is None:
        return "not known"
    for unit, scale in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if value >= scale * (2 if scale >= 60 else 1):
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def need_rows(need: Mapping[str, Any], memory: Mapping[str, int]) -> list[tuple[str, int]]:
    """Rows (title, bytes) that add up to the memory that one rank needs; empty rows are left out.

    Args:
        need: the totals, each of which contains the one before it (``tensors``, then ``rounded`` by the allocator, then ``reserved`` in blocks), and
            the margins.
        memory: the bytes of tensors at the peak, by category.
    """
    rows = [(title, memory[key]) for key, title in CATEGORIES.items() if memory.get(key)]
    parts = {"rounding": need["rounded"] - need["tensors"], "unused": need["reserved"] - need["rounded"], **need}
    return rows + [(title, parts[key]) for key, title in MARGINS.items() if parts[key]]


def title(plan: Mapping[str, Any]) -> str:
    """Return the title of a plan: ``"FSDP on 64 x h100 (8 nodes of 8)"``."""
    job, device = plan["job"], plan["device"]
    nodes = job["nodes"]
    axes = " x ".join(f"{name}={ranks}" for name, ranks in job["axes"].items())
    return (
        f"{job['strategy']}{f' ({axes})' if axes else ''} in {job['precision']} on {job['world_size']} x {device['name']}, "
        f"{plural(nodes, 'node')} of {job['world_size'] // nodes}"
    )


def verdict(plan: Mapping[str, Any]) -> str:
    """A sentence on whether the plan fits."""
    memory = plan["memory"]
    need = f"needs {size(memory['need_bytes'])} of {size(memory['device_bytes'])} on rank {plan['worst_rank']}"
    return {
        "yes": f"It fits: it {need}, margins included.",
        "no": f"It does not fit: it {need}.",
    }.get(plan["verdict"], f"It fits only without the margins: with them it {need}.")


def phase_and_module(moment: Mapping[str, Any]) -> str:
    """The phase of a moment, and the module that runs."""
    module = f" in {moment['module']}" if moment["module"] else ""
    return f"{moment['phase']}{module}"


def time_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Titles and texts on one step: its time, FLOPs, communication and throughput."""
    time = plan["time"]
    slowest = next(entry for entry in plan["ranks"] if entry["step_s"] == max(rank["step_s"] for rank in plan["ranks"]))
    compute = slowest["compute"]
    bounds_text = (
        f", between {duration(time['best_s'])} (all communication hidden) and {duration(time['worst_s'])} (none)"
    )
    rows = [
        ("step", duration(time["step_s"]) + (bounds_text if plan["job"]["world_size"] > 1 else "")),
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
    if (moved := slowest.get("offloaded")) is not None:
        waiting = f"{duration(moved['waiting_s'])} of it not hidden" if moved["waiting_s"] else "hidden"
        rows.append(
            (
                "activations on the host",
                f"{size(moved['host_bytes'])} of pinned memory for each rank; {size(moved['sent_bytes'])} out and "
                f"{size(moved['returned_bytes'])} back a step, {waiting}",
            )
        )
    rows.append(("MFU", f"{time['mfu']:.1%}; at most {time['mfu_bound']:.1%}"))
    tokens = time["tokens_per_second"]
    tokens_text = (
        f", {count(tokens)} tokens/s ({count(tokens / plan['job']['world_size'])} for each device)" if tokens else ""
    )
    rows.append(("throughput", f"{count(time['samples_per_second'])} samples/s{tokens_text}"))
    return rows


def run_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Titles and texts on the whole run: data, checkpoints and cost."""
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
    rows += [
        (
            f"from {stage['start']}",
            f"{plural(stage['steps'], 'step')} of {plural(stage['samples_per_step'], 'sample')}, {duration(stage['step_s'])} each: "
            f"{duration(stage['seconds'])}",
        )
        for stage in data.get("stages", ())
    ]
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
    """A row (quantity, traced, formula, source) for each published formula that differs from the trace."""
    show = {"activations": size}
    rows = []
    for check in plan["checks"]:
        if check["differs"]:
            text = show.get(check["what"], count)
            rows.append((check["what"], text(check["traced"]), text(check["formula"]), check["source"]))
    return rows


def agreeing(plan: Mapping[str, Any]) -> str:
    """A sentence that names the formulas that agree with the trace, or says that no formula applies; empty if none agrees."""
    if not plan["checks"]:
        return "No cross-check by published formulas: the shape of a dense transformer cannot be read from the model."
    names = [check["what"] for check in plan["checks"] if not check["differs"]]
    return f"Published formulas agree within 20 % on: {', '.join(names)}." if names else ""


WIDTH = 140
"""Columns of the output to a file or a pipe, which have no width of their own."""


def console() -> Any:
    """A console for standard output; for a file or a pipe it is :data:`WIDTH` columns wide, unless ``COLUMNS`` is set."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH
    return Console(width=width, markup=False, emoji=False)


def as_text(content: dict[str, Any], show: Callable[[Any, Any], None]) -> str:
    """The text that ``show(content, console)`` prints, without colours."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=WIDTH, color_system=None, legacy_windows=False, markup=False, emoji=False)
    show(content, console)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def terminal_safe(value: Any) -> Any:
    """A copy of JSON values whose texts cannot control the terminal: names of modules and strategies are the user's."""
    if isinstance(value, dict):
        return {terminal_text(key, one_line=True): terminal_safe(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [terminal_safe(inner) for inner in value]
    return terminal_text(value, one_line=True) if isinstance(value, str) else value


def table(*columns: str, text_columns: Iterable[str] = (), folds: Iterable[str] = (), title: str | None = None) -> Any:
    """An empty table.

    Args:
        columns: heads of the columns.
        text_columns: columns of text, besides the first; numbers are on the right.
        folds: columns whose cells break into several lines where the terminal is narrow; cells of other columns stay whole.
        title: line above the table.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    grid = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_header=any(columns),
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for index, column in enumerate(columns):
        grid.add_column(
            column,
            justify="left" if not index or column in text_columns else "right",
            overflow="fold",
            no_wrap=column not in folds,
            min_width=len(column),
        )
    return grid


def bullets(lines: Iterable[str]) -> Any:
    """A list with one bullet for each line; long lines are indented where they continue."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        grid.add_row("  -", Text(line))
    return grid


_MOST_MODULES = 8
"""The maximum number of rows in a table of modules."""


def show_plan(plan: Mapping[str, Any], console: Any) -> None:
    """Print a plan.

    Args:
        plan: the result of :meth:`engine.planning.plan.Plan.as_json`.
        console: rich's console.
    """
    from rich.text import Text

    plan = terminal_safe(plan)
    style = {"yes": "bold green", "no": "bold red"}.get(plan["verdict"], "bold yellow")
    console.print(Text(title(plan), style="bold"))
    console.print(Text(verdict(plan), style=style))
    for line in (*plan["missing"], *plan["computed"]):
        console.print(Text(f"partial: {line}" if line in plan["missing"] else f"computed: {line}", style="yellow"))
    _print(console, *_memory(plan))
    worst = next(rank for rank in plan["ranks"] if rank["rank"] == plan["worst_rank"])
    console.print(Text(f"The peak of rank {worst['rank']} is in: {phase_and_module(worst['peak'])}."))
    if worst["held_at_peak"]:
        _print(console, *_modules_at_peak(worst["held_at_peak"]))
    _print(console, *_pairs("One step", time_rows(plan)))
    if any(rank["collectives"] for rank in plan["ranks"]):
        _print(console, *_communication(plan))
    _print(console, *_pairs("The run", run_rows(plan)))
    if rows := check_rows(plan):
        _print(console, *_checks(rows))
    if sentence := agreeing(plan):
        console.print(Text(sentence))
    console.print(Text("Assumed:", style="bold"))
    console.print(bullets(plan["assumptions"]))


def _print(console: Any, heading: str, rows: Any) -> None:
    from rich.text import Text

    console.print()
    console.print(Text(heading, style="bold"))
    console.print(rows)


def _pairs(heading: str, rows: list[tuple[str, str]]) -> tuple[str, Any]:
    """A heading, and a table of two columns without heads."""
    grid = table("", "", text_columns=("",), folds=("",))
    for row in rows:
        grid.add_row(*row)
    return heading, grid


def _memory(plan: Mapping[str, Any]) -> tuple[str, Any]:
    """The heading and the table of each rank's memory at the peak, by category."""
    ranks = plan["ranks"]
    titles = [f"rank {rank['rank']}{': ' + rank['role'] if rank['role'] else ''}" for rank in ranks]
    grid = table("", *titles)
    columns = [dict(need_rows(rank["need"], rank["peak"]["memory"])) for rank in ranks]
    for row in dict.fromkeys(name for column in columns for name in column):
        grid.add_row(row, *(size(column.get(row, 0)) for column in columns))
    grid.add_row("needed", *(size(rank["need"]["total"]) for rank in ranks), style="bold")
    grid.add_row("the device has", *(size(plan["memory"]["device_bytes"]) for _ in ranks))
    return "Memory at the peak", grid


def _modules_at_peak(bytes_by_module: Mapping[str, int]) -> tuple[str, Any]:
    grid = table("module", "bytes", folds=("module",))
    for name, value in list(bytes_by_module.items())[:_MOST_MODULES]:
        grid.add_row(name or "(outside of modules)", size(value))
    return "Held by modules at the peak", grid


def _communication(plan: Mapping[str, Any]) -> tuple[str, Any]:
    """The heading and the table of the communication of the slowest rank; the other ranks send the same. The plan's title has the ranks of each
    axis."""
    slowest = max(plan["ranks"], key=lambda rank: rank["step_s"])
    text = ("axis", "phase", "overlaps")
    grid = table("kind", *text, "count", "bytes", "time", text_columns=text, folds=("phase",))
    for collective in sorted(slowest["collectives"], key=lambda entry: -entry["seconds"]):
        grid.add_row(
            collective["kind"],
            collective["axis"],
            collective["phase"],
            "yes" if collective["overlaps"] else "no",
            count(collective["count"]),
            size(collective["bytes"]),
            duration(collective["seconds"]),
        )
    return f"Communication of rank {slowest['rank']} in a step", grid


def _checks(rows: list[tuple[str, str, str, str]]) -> tuple[str, Any]:
    grid = table("", "traced", "formula", "source", text_columns=("source",), folds=("source",))
    for row in rows:
        grid.add_row(*row)
    return "Published formulas that differ from the trace by more than 20 %", grid


_MOST_CANDIDATES = 15
"""The maximum number of rows in the table of candidates that fit; ``--json`` prints all."""


def in_python(strategy: object) -> str:
    """A strategy as one types it in a script: ``"fsdp"``, ``{"name": "mesh", "tp": 2}``, or ``MeshParallel(tp=2)``."""
    if isinstance(strategy, str):
        return f'"{strategy}"'
    if isinstance(strategy, Mapping):
        return "{" + ", ".join(f'"{key}": {value_in_python(value)}' for key, value in strategy.items()) + "}"
    if not is_dataclass(strategy):
        return f"{type(strategy).__name__}(...)"
    arguments = [
        f"{option.name}={value_in_python(getattr(strategy, option.name))}"
        for option in fields(strategy)
        if option.init and option.repr and getattr(strategy, option.name) != _default(option)
    ]
    return f"{type(strategy).__name__}({', '.join(arguments)})"


def value_in_python(value: Any) -> str:
    """A setting's value as Python code; text is quoted as in scripts."""
    return f'"{value}"' if isinstance(value, str) and '"' not in value else repr(value)


def _default(option: Any) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


def written(strategy: object) -> str:
    """A strategy as one types it after ``strategy=`` on the command line: ``fsdp``, or ``{name: mesh, tp: 2}``; an object as in a script."""
    if isinstance(strategy, str):
        return strategy
    if not isinstance(strategy, Mapping):
        return in_python(strategy)
    return (
        "{"
        + ", ".join(
            f"{key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in strategy.items()
        )
        + "}"
    )


def show_search(search: Mapping[str, Any], console: Any) -> None:
    """Print the result of a search.

    Args:
        search: the result of :meth:`engine.planning.search.PlanSearch.as_json`.
        console: rich's console.
    """
    from rich.text import Text

    search = terminal_safe(search)
    candidates = search["candidates"]
    fits = [candidate for candidate in candidates if candidate["verdict"] == "fits"]
    console.print(
        Text(
            f"{search['world_size']} x {search['device']}, {size(search['memory_bytes'])} each, steps of {search['global_batch']} samples: "
            f"{len(candidates)} candidates, {search['planned']} planned in {duration(search['seconds'])}, {len(fits)} fit",
            style="bold",
        )
    )
    if fits:
        console.print(_fitting_table(fits))
        for line in _run_commands(fits[0]):
            console.print(Text(line, style="bold green"), soft_wrap=True)
    else:
        console.print(Text(_closest_text(candidates, search["memory_bytes"]), style="bold red"), soft_wrap=True)
    if not_fitting := [candidate for candidate in candidates if candidate["verdict"] != "fits"]:
        console.print(_reason_table(not_fitting))
    console.print(bullets(search["notes"]))


def _run_commands(candidate: Mapping[str, Any]) -> list[str]:
    """Lines that say how to run with the settings of a candidate, on the command line and in a script."""
    commands = [] if candidate["set"] is None else [f"  fit run ... {candidate['set']}"]
    return [
        f"The fastest that fits, with a loader that gives batches of {candidate['micro_batch']} to each rank:",
        *commands,
        f"  {candidate['fit']}",
    ]


def _closest_text(candidates: Iterable[Mapping[str, Any]], memory: int) -> str:
    """A sentence for a search in which nothing fits, with the candidate that needs the least memory."""
    planned = [candidate for candidate in candidates if candidate["need_bytes"] is not None]
    if not planned:
        return "Nothing fits."
    closest = min(planned, key=lambda candidate: candidate["need_bytes"])
    return (
        f"Nothing fits. The closest needs {size(closest['need_bytes'])} of {size(memory)}: {closest['fit']}, "
        f"micro-batches of {closest['micro_batch']}"
    )


def _fitting_table(rows: list[Mapping[str, Any]]) -> Any:
    """The table of the candidates that fit, which are in ``rows``."""
    numbers = ("micro-batch", "window", "needs", "step", "samples/s")
    text = ("strategy", "precision", "recompute")
    grid = table(*text, *numbers, text_columns=text, folds=("strategy",), title="What fits, the fastest first")
    for candidate in rows[:_MOST_CANDIDATES]:
        grid.add_row(
            written(candidate["strategy"])
            + (" (by formulas)" if candidate["computed"] else "")
            + (" (partial)" if candidate["missing"] else ""),
            candidate["precision"],
            str(candidate["activation_checkpointing"] or "none"),
            str(candidate["micro_batch"]),
            str(candidate["accumulate_grad_batches"]),
            size(candidate["need_bytes"]),
            duration(candidate["step_s"]),
            f"{candidate['samples_per_second']:.4g}",
        )
    if len(rows) > _MOST_CANDIDATES:
        grid.add_row(f"... and {len(rows) - _MOST_CANDIDATES} more")
    return grid


def _reason_table(rows: list[Mapping[str, Any]]) -> Any:
    """A table of the candidates that do not fit or were not planned: one row for each reason; for those that are too large, one for each strategy and
    precision, with the smallest need."""
    text = ("strategy", "precision", "verdict", "tried", "why")
    grid = table(
        *text, text_columns=text, folds=("strategy", "verdict", "why"), title="What does not, or was not planned"
    )
    for group in _grouped(rows):
        example = min(group, key=lambda candidate: (candidate["need_bytes"] is None, candidate["need_bytes"] or 0))
        grid.add_row(
            ", ".join(dict.fromkeys(written(candidate["strategy"]) for candidate in group)),
            ", ".join(dict.fromkeys(candidate["precision"] for candidate in group)),
            example["verdict"],
            str(len(group)),
            _reason_text(example),
        )
    return grid


def _reason_text(candidate: Mapping[str, Any]) -> str:
    if candidate["verdict"] == "slower":
        return "the same with larger micro-batches or less recomputation fits"
    if not candidate["need_bytes"]:
        return str(candidate["reason"])
    recompute = candidate["activation_checkpointing"] or "none"
    return f"micro-batch {candidate['micro_batch']}, recompute {recompute}: {candidate['reason']}"


def _grouped(rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The candidates grouped by verdict and reason; those that are too large, by strategy and precision."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for candidate in rows:
        key: tuple[str, ...] = (candidate["verdict"], candidate["reason"])
        if candidate["verdict"] == "slower":
            key = ("slower",)
        elif candidate["verdict"] == "too large":
            key = ("too large", written(candidate["strategy"]), candidate["precision"])
        groups.setdefault(key, []).append(candidate)
    return list(groups.values())
