"""Accelerate's own installed test scripts, run with ``accelerate`` replaced by ``engine.interop.accelerate``.

    python tests/benchmarks/accelerate_scripts.py [--target theirs exact accelerate] [--processes 1 2] [--check]

Targets: ``theirs`` is the package itself, ``exact`` and ``accelerate`` are the two rules of our ``Accelerator``. Each test function of the scripts is
called as their ``main`` calls it, and a few more on the CPU that ``main`` keeps for GPUs; several processes are real ones over gloo. What
fails on purpose stands in ``DIFFERENCES`` with the reason. With ``--check`` the exit status is 1 when anything else fails, or when a
difference is gone.

Two things are substituted, because nothing is downloaded: where a script loads MRPC and BERT, it gets a BERT of 2 layers with random
weights and 40 made-up pairs; ``evaluate``'s metric is an accuracy of three lines.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
START_S = 300.0
"""How long importing torch and transformers may take on a machine that does other things."""
BOTH, ONE, TWO = (1, 2), (1,), (2,)
_ALL = list(product((True, False), repeat=3))
_OPS = "gather gather_object gather_non_contiguous broadcast pad_across_processes reduce_sum reduce_mean reduce_max op_checker"
_DATA = (
    "default_ensures_even_batch_sizes can_disable_even_batches can_join_uneven_inputs join_can_override_even_batches"
)
_MIXED = "join_can_override_for_mixed_type_dataloaders join_raises_warning_for_iterable_when_overriding_even_batches pickle_accelerator"
_LOADERS = {
    "shuffle=False": "DataLoader(DummyDataset(), shuffle=False, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)",
    "shuffle=True": "DataLoader(DummyDataset(), shuffle=True, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)",
    "batch_sampler": "DataLoader(DummyDataset(), batch_sampler=BatchSampler(RandomSampler(DummyDataset()), BATCH_SIZE, False), "
    "num_workers=NUM_WORKERS)",
    "sampler": "DataLoader(DummyDataset(), sampler=BatchSampler(RandomSampler(DummyDataset()), BATCH_SIZE, False), batch_size=None, "
    "collate_fn=default_collate, num_workers=NUM_WORKERS)",
}
_SCRIPT = (
    "process_execution_check init_state_check rng_sync_check dl_preparation_check central_dl_preparation_check custom_sampler_check "
    "check_seedable_sampler check_seedable_sampler_with_data_seed test_split_between_processes_list "
    "test_split_between_processes_nested_dict test_split_between_processes_tensor test_split_between_processes_evenly test_trigger "
    "test_reinstantiated_state"
)
_RUN = "training_function({{'lr': 2e-5, 'num_epochs': 2, 'seed': 42, 'batch_size': 8}}, {args})"
_ARGS = "SimpleNamespace(model_name_or_path='tiny', output_dir=OUT, {})"
_PERFORMANCE = (
    "performance_lower_bound=None, num_epochs=2, add_pad_token=False, tp_plan=None, tp_size=None, model_dtype=None"
)
CASES: list[tuple[str, str, tuple[int, ...]]] = [
    ("test_sync", "test_dataloader_break()", BOTH),
    ("test_sync", "test_noop_sync(Accelerator())", ONE),
    ("test_sync", "test_distributed_sync(Accelerator())", TWO),
    ("test_sync", "test_distributed_sync_multiple_fwd(Accelerator())", TWO),
    *(("test_sync", f"test_gradient_accumulation{each}", TWO) for each in _ALL),
    ("test_sync", "test_gradient_accumulation_with_opt_and_scheduler(False, False, False)", ONE),
    *(("test_sync", f"test_gradient_accumulation_with_opt_and_scheduler{each}", TWO) for each in _ALL),
    *(("test_ops", f"test_{name}(PartialState())", BOTH) for name in _OPS.split()),
    *(("test_distributed_data_loop", f"test_{name}()", TWO) for name in (f"{_DATA} {_MIXED}").split()),
    ("test_distributed_data_loop", "join_raises_warning_for_non_ddp_distributed(create_accelerator())", TWO),
    *(
        ("test_distributed_data_loop", f"test_data_loader({each}, create_accelerator())", TWO)
        for each in _LOADERS.values()
    ),
    ("test_distributed_data_loop", "test_stateful_dataloader(create_accelerator())", TWO),
    ("test_distributed_data_loop", "test_stateful_dataloader_save_state(create_accelerator())", TWO),
    *(("test_script", f"{name}()", BOTH) for name in _SCRIPT.split()),
    ("test_script", "test_split_between_processes_dataset(__import__('datasets').Dataset)", BOTH),
    ("test_script", "check_seedable_sampler_in_batch_sampler_shard()", TWO),
    ("test_script", "training_check(use_seedable_sampler=False)", BOTH),
    ("test_script", "training_check(use_seedable_sampler=True)", BOTH),
    *(
        (
            "test_metrics",
            f"test_torch_metrics(Accelerator(dataloader_config=DataLoaderConfiguration(split_batches={s}, dispatch_batches={d})), 99)",
            BOTH,
        )
        for s, d in product((True, False), repeat=2)
    ),
    ("test_metrics", "test_torch_metrics(Accelerator(), 512)", BOTH),
    ("test_metrics", "test_gather_for_metrics_drop_last()", BOTH),
    ("test_metrics", "gathered_stream(test_gather_for_metrics_with_iterable_dataset)", BOTH),
    ("test_metrics", "gathered_stream(test_gather_for_metrics_with_non_tensor_objects_iterable_dataset)", BOTH),
    *(("test_metrics", f"test_mrpc{each}", BOTH) for each in product((True, False), repeat=2)),
    ("test_performance", _RUN.format(args=_ARGS.format(_PERFORMANCE)), BOTH),
    ("test_checkpointing", "train_and_resume()", BOTH),
]
"""Script, call, numbers of processes."""
_DISPATCH = "every process reads its own samples; dispatch_batches=True is an error under exact rules"
_WINDOW = "the last window of the epoch holds one micro-batch, and is divided by one rather than by two"
_NO_PADDING = "nothing is padded: all ranks have equally many micro-batches, and a repeated one weighs nothing"
_STATE = "an Accelerator does not depend on a process-wide state, and works on after it was reset"
_ORDER = "a shuffle is a function of (seed, epoch), not of the loader's generator"
_SCHEDULE = "a scheduler steps once for each step of the optimizer, not once for each process"
DIFFERENCES: dict[str, dict[str, str]] = {
    "theirs": {},
    "exact": {
        "2: test_gradient_accumulation(True, True": _DISPATCH,
        "2: test_gradient_accumulation(False, True": _DISPATCH,
        "2: test_gradient_accumulation(": _WINDOW,
        "2: test_gradient_accumulation_with_opt_and_scheduler(True, True": _DISPATCH,
        "2: test_gradient_accumulation_with_opt_and_scheduler(False, True": _DISPATCH,
        "2: test_gradient_accumulation_with_opt_and_scheduler(True": _WINDOW,
        "2: test_gradient_accumulation_with_opt_and_scheduler(False": _SCHEDULE,
        "test_default_ensures_even_batch_sizes": _NO_PADDING,
        "test_can_disable_even_batches": _NO_PADDING,
        "test_can_join_uneven_inputs": _NO_PADDING,
        "test_join_": _NO_PADDING,
        "test_reinstantiated_state": _STATE,
        "training_check(use_seedable_sampler=False": _ORDER,
        "test_torch_metrics(Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=True": _DISPATCH,
        "test_torch_metrics(Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=False, dispatch_batches=True": _DISPATCH,
        "gathered_stream(test_gather_for_metrics_with_iterable_dataset": "the loader of a stream is not a dispatcher: each process reads the stream",
        "test_mrpc(True": _DISPATCH,
        "2: training_function": _SCHEDULE,
    },
    "accelerate": {"test_reinstantiated_state": _STATE},
}
"""Target -> the beginning of a call, with the number of processes or without -> why it fails on purpose."""


# -- in the processes -----------------------------------------------------------------------------------------------------------------


def _worker(target: str, wanted: list[int], report: Path) -> None:
    sys.path.insert(0, str(ROOT))
    scripts = _Scripts(target)

    def tell(**row: Any) -> None:
        with report.open("a") as file:
            file.write(json.dumps(row) + "\n")

    for number in wanted:
        script, call, _ = CASES[number]
        tell(begun=number)
        try:
            scripts.run(script, call)
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
            tell(failed=number, error=text, trace=traceback.format_exc())
            if not _all_failed(number, report):
                os._exit(1)
        else:
            tell(passed=number)
    os._exit(0)


def _all_failed(number: int, report: Path) -> bool:
    """Whether every process has failed in this case: none waits for another, and the next case can begin."""
    others = [report.with_name(f"{rank}.jsonl") for rank in range(int(os.environ.get("WORLD_SIZE", "1")))]
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        if all(f'"failed": {number},' in path.read_text() for path in others if path.exists()):
            return True
        time.sleep(0.05)
    return False


class _Scripts:
    """Accelerate's scripts as modules, over the package that a target names."""

    def __init__(self, target: str) -> None:
        import accelerate
        import transformers

        for name in (
            "AutoTokenizer",
            "get_linear_schedule_with_warmup",
            "set_seed",
        ):  # with the accelerate that it expects
            getattr(transformers, name)
        self.tiny = _Tiny(transformers)
        self.tiny.model("tiny")
        self.where = Path(accelerate.__file__).parent
        theirs = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "accelerate"}
        if target != "theirs":
            self._replace(target)
        self.accelerate, self.state = sys.modules["accelerate"], sys.modules["accelerate.state"]
        stub: Any = types.ModuleType("evaluate")
        stub.load = lambda *names: _Accuracy()
        sys.modules.setdefault("evaluate", stub)
        self._made = {script: self._script(script) for script in dict.fromkeys(script for script, _, _ in CASES)}
        sys.modules.update(theirs)  # transformers reads it later

    def _replace(self, target: str) -> None:
        from engine.compat.accelerate.utils import dataclasses as settings
        from engine.interop import accelerate as ours
        from engine.interop.accelerate import accelerator, data_loader, operations, state, utils

        inspect.unwrap(ours.Accelerator.__init__).__kwdefaults__["rules"] = target  # below the check of its arguments
        for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
            del sys.modules[name]
        accelerator.DataLoaderConfiguration = settings.DataLoaderConfiguration
        accelerator.GradientAccumulationPlugin = settings.GradientAccumulationPlugin
        testing = ast.parse((self.where / "test_utils/testing.py").read_text())
        wanted = ("are_the_same_tensors", "assert_exception")
        body = [node for node in testing.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
        helpers: Any = types.ModuleType("accelerate.test_utils")
        given = "import torch\nfrom contextlib import contextmanager\nfrom typing import Optional\n"
        vars(helpers).update(AcceleratorState=state.AcceleratorState, gather=operations.gather, torch_device="cpu")
        exec(given + ast.unparse(ast.Module(body, [])), vars(helpers))
        deepspeed: Any = types.ModuleType("accelerate.utils.deepspeed")
        deepspeed.DummyOptim, deepspeed.DummyScheduler = utils.DummyOptim, utils.DummyScheduler
        sys.modules.update(
            {
                "accelerate": ours,
                "accelerate.accelerator": accelerator,
                "accelerate.data_loader": data_loader,
                "accelerate.state": state,
                "accelerate.utils": utils,
                "accelerate.utils.dataclasses": settings,
                "accelerate.utils.operations": operations,
                "accelerate.parallelism_config": settings,
                "accelerate.utils.deepspeed": deepspeed,
                "accelerate.test_utils": helpers,
                "accelerate.test_utils.testing": helpers,
            }
        )
        training = self._load("accelerate.test_utils.training", self.where / "test_utils/training.py")
        helpers.RegressionDataset, helpers.RegressionModel = training.RegressionDataset, training.RegressionModel

    def _script(self, name: str) -> Any:
        path = self.where / f"test_utils/scripts/{name}.py"
        module = self._load(f"script_{name}", path if path.is_file() else path.parent / "external_deps" / path.name)
        self.tiny.substitute(module)
        vars(module).setdefault("gathered_stream", _gathered_stream)
        module.SimpleNamespace, module.train_and_resume = types.SimpleNamespace, lambda: _train_and_resume(module)
        module.join_raises_warning_for_non_ddp_distributed = lambda accelerator: _not_ddp(module, accelerator)
        return module

    def run(self, script: str, call: str) -> None:
        module = self._made[script]
        self.state.AcceleratorState._reset_state(True)
        self.state.GradientState._reset_state()
        module.OUT = str(_shared_folder(self.state.PartialState(cpu=True)))
        self.accelerate.Accelerator(cpu=True)
        eval(call, vars(module))

    @staticmethod
    def _load(name: str, path: Path) -> Any:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _shared_folder(state: Any) -> Path:
    """A new folder that all processes know."""
    made = [tempfile.mkdtemp() if state.process_index == 0 else None]
    if state.num_processes > 1:
        import torch.distributed as dist

        dist.broadcast_object_list(made)
    assert made[0] is not None
    return Path(made[0])


def _not_ddp(module: Any, accelerator: Any) -> None:
    before, accelerator.state.distributed_type = accelerator.state.distributed_type, module.DistributedType.FSDP
    try:
        module.test_join_raises_warning_for_non_ddp_distributed(accelerator)
    finally:
        accelerator.state.distributed_type = before


def _gathered_stream(test: Any) -> None:
    """``main`` calls these on a GPU only: there the loader is a dispatcher, and Accelerate has logged something."""
    import logging

    logging.getLogger("accelerate.accelerator")
    test()


def _train_and_resume(module: Any) -> None:
    config = {"lr": 2e-5, "num_epochs": 2, "seed": 42, "batch_size": 8}
    given = {"model_name_or_path": "tiny", "output_dir": module.OUT, "num_epochs": 2}
    module.training_function(
        config, types.SimpleNamespace(**given, resume_from_checkpoint=None, partial_train_epoch=None)
    )
    resumed = f"{module.OUT}/epoch_0"
    module.training_function(
        config, types.SimpleNamespace(**given, resume_from_checkpoint=resumed, partial_train_epoch=None)
    )


class _Accuracy:
    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        self.pairs += zip(predictions.tolist(), references.tolist(), strict=True)

    def compute(self) -> dict[str, float]:
        pairs, self.pairs = self.pairs, []
        right = sum(one == other for one, other in pairs) / len(pairs)
        return {"accuracy": right, "f1": right}


class _Tiny:
    """A model and data in place of BERT and MRPC."""

    def __init__(self, transformers: Any) -> None:
        self._classes = (
            transformers.BertConfig,
            transformers.AutoModelForSequenceClassification,
            transformers.BatchEncoding,
        )

    def substitute(self, module: Any) -> None:
        if hasattr(module, "AutoModelForSequenceClassification"):
            module.AutoModelForSequenceClassification = types.SimpleNamespace(from_pretrained=self.model)
        if hasattr(module, "get_dataloaders"):
            module.get_dataloaders = lambda accelerator, batch_size=8, name="": (
                self.loader(40, batch_size, True),
                self.loader(21, 4),
            )
        if hasattr(module, "get_dataloader"):
            module.get_dataloader = lambda accelerator, longest=False: self.loader(21, 4)

    def model(self, name: str, return_dict: bool = True) -> Any:
        import torch

        config, auto, _ = self._classes
        torch.manual_seed(0)
        return auto.from_config(
            config(vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
        )

    def loader(self, length: int, batch_size: int, shuffle: bool = False) -> Any:
        import torch
        from torch.utils.data import DataLoader

        numbers = torch.Generator().manual_seed(1)
        rows = [
            (torch.randint(0, 30, (6,), generator=numbers), int(torch.randint(0, 2, (), generator=numbers)))
            for _ in range(length)
        ]

        def collate(items: list[Any]) -> Any:
            ids = torch.stack([each for each, _ in items])
            return self._classes[2]({"input_ids": ids, "labels": torch.tensor([label for _, label in items])})

        return DataLoader(rows, batch_size=batch_size, shuffle=shuffle, collate_fn=collate)  # type: ignore[arg-type]


# -- in the program -------------------------------------------------------------------------------------------------------------------


def measure(target: str, world_size: int, only: str = "") -> dict[int, str | None]:
    """The error of each case (``None``: it passed). A process that fails or waits too long ends its job; the rest goes on in a new one."""
    left = [i for i, (script, call, sizes) in enumerate(CASES) if world_size in sizes and only in f"{script} {call}"]
    found: dict[int, str | None] = {}
    while left:
        with tempfile.TemporaryDirectory() as folder:
            reports = [Path(folder) / f"{rank}.jsonl" for rank in range(world_size)]
            _job(target, world_size, left, reports)
            rows = [
                [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
                for path in reports
            ]
            if not any(rows):
                raise RuntimeError((Path(folder) / "0.log").read_text()[-3000:])
        passed = set.intersection(*({row["passed"] for row in own if "passed" in row} for own in rows))
        found |= dict.fromkeys(passed, None)
        found |= {row["failed"]: row["error"] for own in rows for row in own if "failed" in row}
        left = [number for number in left if number not in found]
        if left and any(row.get("begun") == left[0] for own in rows for row in own):
            found[left[0]] = "waits forever, or ends its process"
            left = left[1:]
    return found


def _job(target: str, world_size: int, wanted: list[int], reports: list[Path]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--worker", target, "--cases", json.dumps(wanted)]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    running = []
    for rank, report in enumerate(reports):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world_size > 1 else {}
        env = {**os.environ, **own, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        where = report.parent / f"work{rank if world_size == 1 else ''}"
        where.mkdir(exist_ok=True)
        with (report.parent / f"{rank}.log").open("w") as log:
            running.append(
                subprocess.Popen([*command, "--report", str(report)], env=env, stdout=log, stderr=log, cwd=where)
            )
    _wait(running, reports)


def _wait(running: list[subprocess.Popen[bytes]], reports: list[Path]) -> None:
    """Until all have ended, one has failed, or nothing was reported for :data:`PATIENCE_S`."""
    size, since = -1, time.monotonic()
    while any(each.poll() is None for each in running):
        now = sum(path.stat().st_size for path in reports if path.exists())
        if now != size:
            size, since = now, time.monotonic()
        if any(each.poll() for each in running) or time.monotonic() - since > (PATIENCE_S if size > 0 else START_S):
            break
        time.sleep(0.05)
    for each in running:
        each.kill()
        each.wait()


def reason(target: str, world_size: int, call: str) -> str | None:
    """Why this case fails on purpose."""
    return next(
        (
            why
            for start, why in DIFFERENCES[target].items()
            if f"{world_size}: {call}".startswith(start) or call.startswith(start)
        ),
        None,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--target", nargs="*", default=["exact", "accelerate"], choices=["theirs", "exact", "accelerate"]
    )
    parser.add_argument("--processes", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--only", default="", help="cases with this text")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--cases", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _worker(arguments.worker, arguments.cases, arguments.report)
    wrong = 0
    for target, world_size in product(arguments.target, arguments.processes):
        found = measure(target, world_size, arguments.only)
        counts = {"passed": 0, "differs": 0, "wrong": 0}
        for number, error in sorted(found.items()):
            script, call, _ = CASES[number]
            why = reason(target, world_size, call)
            kind = "passed" if error is None and why is None else "differs" if error and why else "wrong"
            counts[kind] += 1
            if kind != "passed":
                print(
                    f"  {kind}: {script}: {call}\n      {error or 'passes'}\n      {why or 'not a known difference'}",
                    flush=True,
                )
        print(f"{target}, {world_size} process(es): {counts}", flush=True)
        wrong += counts["wrong"]
    return int(arguments.check and wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
