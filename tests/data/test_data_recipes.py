"""Every recipe of ``engine/data/sources.md``: stopped within an epoch on one process, continued on two, it trains the samples of an undisturbed run.

A page's block defines ``loader``. Recipes over packages that are not installed are skipped.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import logging
import os
import sqlite3
import sys
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.documents import ROOT, blocks_of
from support.internals import forget_warnings
from support.ranks import ranks_of_file
from support.resumable import resumable_fit

from engine import Callback, Run, TrainModule

SAMPLES, STOP, END = 120, 13, 24  # an epoch has ten steps of twelve samples
BLOCKS = blocks_of((ROOT / "engine/data/sources.md").read_text())
PACKAGES = ("datasets", "torchdata", "pyarrow", "grain", "webdataset", "ray")
AGAIN = "batches are read and discarded"


def packages_of(recipe: str) -> set[str]:
    """The packages of others that a recipe imports."""
    nodes = list(ast.walk(ast.parse(recipe)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names} & set(PACKAGES)


def name_of(recipe: str) -> str:
    """The package, and what distinguishes the recipe from others over it."""
    marks = ("iter_dataset", "interleave", "shuffle", "streaming", "Stateful", "RowGroups", "Scan", "sqlite", "mmap")
    kind = next((mark for mark in marks if f"{mark}(" in recipe or mark in recipe.replace("shuffle=", "")), "")
    return " ".join(filter(None, [*sorted(packages_of(recipe)), kind]))


RECIPES = {name_of(block.text): block.text for block in BLOCKS if block.language == "python"}
QUICK = {name: recipe for name, recipe in RECIPES.items() if not packages_of(recipe)}
RAY = {name: recipe for name, recipe in RECIPES.items() if "ray" in packages_of(recipe)}
OTHERS = {name: recipe for name, recipe in RECIPES.items() if name not in QUICK and name not in RAY}
READ_AGAIN = {"datasets shuffle", "webdataset", "pyarrow Scan", "ray"}


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight(torch.tensor(ids(batch)).float().unsqueeze(1) / 1e4).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def ids(batch: Any) -> list[int]:
    values = batch["id"] if "id" in batch else batch["input_ids"][:, 0] // 4
    return [int(value) for value in values]


class Seen(Callback):
    """The samples of each step on this rank."""

    def __init__(self) -> None:
        self.steps: dict[int, list[int]] = {}

    def on_train_batch_start(self, run: Run, module: Any, batch: Any, batch_idx: int) -> None:
        if run.engine.window.share.size:  # 0: a repeated batch
            self.steps.setdefault(run.step, []).extend(ids(batch))


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(recipe: str, folder: Path, ranks: int, steps: int, resume: Any = None) -> tuple[Seen, Any, list[str]]:
    forget_warnings(pytest.MonkeyPatch())
    names: dict[str, Any] = {"__name__": "recipe"}
    seen, said = Seen(), Warnings()
    logging.getLogger("engine").addHandler(said)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exec(compile(recipe, "recipe", "exec"), names)
            loader = names["loader"]
            window = (
                {"global_batch_size": 12}
                if getattr(loader, "batch_size", None)
                else {"accumulate_grad_batches": 4 // ranks}
            )
            fit = resumable_fit(folder, seen, devices=ranks, max_steps=steps, max_epochs=9, **window)
            result = fit.run(Net(), loader, resume=resume)
    finally:
        logging.getLogger("engine").removeHandler(said)
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
    ours = [str(w.message) for w in caught if "engine" in w.filename or AGAIN in str(w.message)]
    return seen, result, said.texts + ours


def write_data(folder: Path) -> None:
    """The samples 0 to 119, in every form that a recipe reads."""
    (folder / "data").mkdir()
    np.save(folder / "data/tokens.npy", np.arange(4 * SAMPLES, dtype=np.uint16))
    with sqlite3.connect(folder / "data/samples.db") as connection:
        connection.execute("CREATE TABLE samples (number INTEGER PRIMARY KEY, value INTEGER)")
        connection.executemany("INSERT INTO samples VALUES (?, ?)", [(n, n) for n in range(SAMPLES)])
    connection.close()
    for shard in range(4):
        numbers = range(30 * shard, 30 * shard + 30)
        with tarfile.open(folder / f"data/part-{shard}.tar", "w") as archive:
            for number in numbers:
                content = str(number).encode()
                entry = tarfile.TarInfo(f"{number:06d}.txt")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        if importlib.util.find_spec("pyarrow") is not None:
            import pyarrow
            import pyarrow.parquet

            table = pyarrow.table({"id": list(numbers)})
            pyarrow.parquet.write_table(table, folder / f"data/part-{shard}.parquet", row_group_size=10)


def begun(recipes: dict[str, str], folder: Path) -> dict[str, dict[int, list[int]]]:
    """The steps of undisturbed runs on one process; checkpoints of stopped ones are in the folder."""
    write_data(folder)
    steps, checkpoints, before = {}, {}, Path.cwd()
    os.chdir(folder)
    try:
        for name, recipe in recipes.items():
            if any(importlib.util.find_spec(package) is None for package in packages_of(recipe)):
                continue
            try:
                steps[name] = train(recipe, folder / "whole", 1, END)[0].steps
                checkpoints[name] = str(train(recipe, folder / "stopped" / name, 1, STOP)[1].last_checkpoint)
            except Exception as error:
                steps[name] = {-1: [repr(error)]}
    finally:
        os.chdir(before)
    (folder / "recipes.json").write_text(json.dumps({name: [recipes[name], checkpoints[name]] for name in checkpoints}))
    return steps


def ray_begun() -> dict[str, dict[int, list[int]]]:
    return begun(RAY, Path(os.environ["SOURCES"]))


def two_resumed() -> dict[str, Any]:
    return resumed()


def slow_resumed() -> dict[str, Any]:
    return resumed()


def resumed() -> dict[str, Any]:
    folder = Path(os.environ["SOURCES"])
    os.chdir(folder)
    found = {}
    for name, (recipe, checkpoint) in json.loads((folder / "recipes.json").read_text()).items():
        try:
            seen, _, said = train(recipe, folder / "continued" / name, 2, END, checkpoint)
            found[name] = {"steps": seen.steps, "said": said}
        except Exception as error:
            found[name] = {"error": repr(error)}
    return found


def check(name: str, whole: dict[str, dict[int, list[int]]], ranks: list[dict[str, Any]]) -> None:
    if name not in whole:
        assert "SOURCES_REQUIRED" not in os.environ, f"not installed: {packages_of(RECIPES[name])}"
        pytest.skip(f"not installed: {packages_of(RECIPES[name])}")
    assert len(whole[name]) == END, whole[name]
    assert not [rank[name]["error"] for rank in ranks if "error" in rank[name]]
    steps: dict[int, list[int]] = {}
    for rank in ranks:
        for step, numbers in rank[name]["steps"].items():
            steps.setdefault(int(step), []).extend(numbers)
    expected = {step: sorted(numbers) for step, numbers in whole[name].items() if step >= STOP}
    assert {step: sorted(numbers) for step, numbers in steps.items()} == expected
    again = [AGAIN in " ".join(rank[name]["said"]) for rank in ranks]
    assert again == [name in READ_AGAIN] * 2


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("sources")
    return begun(QUICK, folder), ranks_of_file(__file__, 2, "two_", SOURCES=str(folder))["resumed"]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("sources")
    return begun(OTHERS, folder), ranks_of_file(__file__, 2, "slow_", SOURCES=str(folder))["resumed"]


@pytest.mark.parametrize("name", QUICK)
def test_data_of_files_and_databases(quick: Any, name: str) -> None:
    check(name, *quick)


@pytest.fixture(scope="module")
def of_ray(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """In a process of its own: Ray replaces its debugger, its handler of SIGTERM and its hook of exceptions."""
    folder = tmp_path_factory.mktemp("sources")
    (whole,) = ranks_of_file(__file__, 1, "ray_", SOURCES=str(folder))["begun"]
    whole = {name: {int(step): numbers for step, numbers in steps.items()} for name, steps in whole.items()}
    return whole, ranks_of_file(__file__, 2, "slow_", SOURCES=str(folder))["resumed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_data_of_other_packages(others: Any, name: str) -> None:
    check(name, *others)


@pytest.mark.slow
@pytest.mark.parametrize("name", RAY)
def test_data_of_ray(of_ray: Any, name: str) -> None:
    check(name, *of_ray)


def test_every_block_of_the_page_is_a_recipe_of_its_own() -> None:
    assert len(RECIPES) == len([block for block in BLOCKS if block.language == "python"]) == 14
