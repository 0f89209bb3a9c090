"""Which optimizers train under which strategy and resume to the bit: a survey of real packages, and its table in the chapter on strategies.

    python tests/strategies/optimizer_survey.py            # exit status 1 if the record, or the chapter's table, is not what is measured now
    python tests/strategies/optimizer_survey.py --write    # update both

Each optimizer trains a small network for four steps with clipping, in one process and on two ranks, and again from the checkpoint of the second step.
The record beside this file has the result for each; ``test_optimizer_survey.py`` compares it with the chapter, and, as a slow test, measures again.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.ranks import rank_variables, ranks_of  # noqa: E402

from callbacks import ModelCheckpoint  # noqa: E402
from engine import Fit, MeshParallel, TrainModule  # noqa: E402

RECORD = Path(__file__).with_name("optimizer_survey.json")
CHAPTER = ROOT / "engine" / "strategies" / "README.md"
STRATEGIES = ("single", "ddp", "fsdp", "tp")
SAME = 1e-6
"""Weights that differ by at most this, as a part of a tensor's largest value, are the same: fp64 runs differ by 1e-12 or less, fp32 sums by 1e-7."""
BOUNDS = (SAME, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
ALL, MATRICES, FLAGGED, NAMED, MODEL = "all", "matrices", "flagged", "named", "model"
"""What an optimizer is given: all parameters; matrices, beside AdamW for the rest; groups with ``use_muon``; names and parameters; the module."""
LOW_RANK = {"rank": 4, "update_proj_gap": 2, "scale": 1.0, "projection_type": "std"}


class Surveyed(NamedTuple):
    """An optimizer of the survey."""

    name: str
    """As in the table."""
    module: str
    cls: str
    given: str = ALL
    options: Mapping[str, Any] = {}
    precision: str = "64-true"
    """fp64 tells a wrong number from rounding; where states or kernels have no fp64 it is another."""

    def create(self, net: nn.Module) -> Any:
        """The optimizers for a network."""
        cls = getattr(importlib.import_module(self.module), self.cls)
        options = {"lr": 0.01, **self.options}
        parameters = list(net.parameters())
        matrices, rest = [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]
        if self.given == MATRICES:
            return [cls(matrices, **options), torch.optim.AdamW(rest, lr=0.01)]
        if self.given == FLAGGED:
            flags = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
            return cls(flags, **options)
        if self.given == NAMED:
            return cls(net.named_parameters(), **options)
        if self.given == MODEL:
            return cls(net, **options)
        if "rank" in options:
            low_rank = {name: options.pop(name) for name in LOW_RANK}
            return cls([{"params": matrices, **low_rank}, {"params": rest}], **options)
        return cls(parameters, **options)


def _of_torch(name: str, **options: Any) -> Surveyed:
    return Surveyed(f"`torch.optim.{name}`", "torch.optim", name, MATRICES if name == "Muon" else ALL, options)


def _of_package(package: str, name: str, given: str = ALL, precision: str = "64-true", **options: Any) -> Surveyed:
    title = {"lion_pytorch": "lion-pytorch", "pytorch_optimizer": "pytorch_optimizer"}.get(package, package)
    module = {"torchao": "torchao.optim", "bitsandbytes": "bitsandbytes.optim"}.get(package, package)
    return Surveyed(f"`{name.lstrip('_')}` ({title})", module, name, given, options, precision)


_IN_FP32 = {"precision": "32-true"}
SURVEY = (
    *map(_of_torch, ("SGD", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop")),
    *map(_of_torch, ("Adafactor", "Muon")),
    *(_of_package("schedulefree", name) for name in ("AdamWScheduleFree", "SGDScheduleFree")),
    _of_package("lion_pytorch", "Lion", lr=1e-3),
    _of_package("prodigyopt", "Prodigy", lr=1.0),
    *(_of_package("torchao", name, **_IN_FP32) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
    Surveyed(
        "`_AdamW` (torchao) with stochastic rounding to bf16",
        "torchao.optim", "_AdamW", ALL, {"bf16_stochastic_round": True}, "bf16-true",
    ),
    *(_of_package("bitsandbytes", name, **_IN_FP32) for name in ("AdamW8bit", "PagedAdamW8bit", "PagedAdamW", "Lion8bit")),
    *(_of_package("bitsandbytes", name, **_IN_FP32) for name in ("AdEMAMix8bit", "LAMB8bit")),
    *(_of_package("heavyball", name, **_IN_FP32) for name in ("Muon", "SOAP", "SFAdamW")),
    *(_of_package("pytorch_optimizer", name, FLAGGED) for name in ("Muon", "AdaMuon", "NorMuon")),
    *(_of_package("pytorch_optimizer", name) for name in ("SOAP", "Shampoo", "ScalableShampoo", "Kron", "CAME", "AdaFactor")),
    *(_of_package("pytorch_optimizer", name) for name in ("Lamb", "LARS", "NovoGrad", "SM3", "Adalite", "StableAdamW")),
    *(_of_package("pytorch_optimizer", name) for name in ("MARS", "ADOPT", "Adan", "AdEMAMix", "Lion", "Tiger")),
    _of_package("pytorch_optimizer", "AdamMini", MODEL),
    *(_of_package("pytorch_optimizer", name) for name in ("ScheduleFreeAdamW", "MADGRAD", "AggMo", "SPAM", "AdaGC")),
    *(_of_package("pytorch_optimizer", name, lr=1.0) for name in ("Prodigy", "DAdaptAdam")),
    *(_of_package("pytorch_optimizer", name, **LOW_RANK) for name in ("GaLore", "APOLLO", "Conda")),
    *(_of_package("pytorch_optimizer", name) for name in ("SCION", "SophiaH", "AdaHessian")),
    _of_package("pytorch_optimizer", "LOMO", MODEL),
)  # fmt: skip


def is_installed(surveyed: Surveyed) -> bool:
    """Whether the optimizer's package is."""
    return importlib.util.find_spec(surveyed.module.partition(".")[0]) is not None


# -- what is measured -----------------------------------------------------------------------------------------------------------------


class Net(TrainModule):
    """A perceptron with matrices large enough to be quantized in blocks."""

    def __init__(self, surveyed: Surveyed) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.surveyed = surveyed
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 64))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 8)

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {"layers.0": "colwise", "layers.1": "rowwise"}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = nn.functional.gelu(layer(x.to(self.head.weight.dtype)))
        return nn.functional.cross_entropy(self.head(self.norm(x)), y)

    def configure_optimizers(self) -> Any:
        return self.surveyed.create(self)


def trained(surveyed: Surveyed, strategy: str, folder: Path, resume: str | None = None) -> dict[str, Tensor]:
    """The weights after the fourth step, on the main process."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 64, generator=generator), torch.randint(8, (32,), generator=generator))
    fit = Fit(
        strategy=MeshParallel(tp=2) if strategy == "tp" else strategy,
        accelerator="cpu",
        precision=surveyed.precision,
        max_steps=4,
        seed=0,
        global_batch_size=8,
        gradient_clip_val=1.0,
        root_dir=folder,
        callbacks=[ModelCheckpoint(every="2 steps", save_top_k=-1)],
    )
    net = Net(surveyed)
    fit.run(net, DataLoader(data, batch_size=8 if strategy in ("single", "tp") else 4), resume=resume)
    return {name: value.double() for name, value in fit.state_dict(net).items()}


def difference(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """The largest difference, as a part of the largest value of its tensor."""
    return max(float((value - others[name]).abs().max() / value.abs().max()) for name, value in weights.items())


def measured(surveyed: Surveyed, strategy: str, folder: Path, alone: Path) -> dict[str, Any]:
    """Train and resume: the differences, or the error.

    Args:
        alone: the file for the weights of one process.
    """
    try:
        weights = trained(surveyed, strategy, folder / "all")
    except Exception as error:
        return {"refused": sentence(error)}
    try:
        resumed = trained(surveyed, strategy, folder / "part", str(next((folder / "all").rglob("step=00000002"))))
    except Exception as error:
        return {"not resumed": sentence(error)}
    if not weights:  # not the main process
        return {}
    if strategy == "single":
        torch.save(weights, alone)
    from_one = difference(weights, torch.load(alone)) if alone.exists() else None
    return {"resumed": difference(weights, resumed), "from one process": from_one}


def sentence(error: Exception) -> str:
    """The kind and the text of an error, without names of files."""
    text = str(error).replace(tempfile.gettempdir(), "")
    return f"{type(error).__name__}: {text}"


@contextmanager
def without_launcher() -> Iterator[None]:
    """A rank is a process of its own inside the block."""
    names = (*rank_variables(0, 1, 0), "TORCHELASTIC_USE_AGENT_STORE")
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def on_two_ranks(root: str, *names: str) -> dict[str, dict[str, Any]]:
    """Measure everything; each rank is first one process for half of the optimizers."""
    chosen = [surveyed for surveyed in SURVEY if is_installed(surveyed) and (not names or surveyed.name in names)]
    rank, folder = int(os.environ["RANK"]), Path(root)
    found: dict[str, dict[str, Any]] = {surveyed.name: {} for surveyed in chosen}
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if importlib.util.find_spec("heavyball"):
        importlib.import_module("heavyball").utils.compile_mode = None
    with torch.compiler.set_stance("force_eager"), open(os.devnull, "w") as nowhere:
        sys.stdout, shown = nowhere, sys.stdout  # some packages print
        with without_launcher():
            for number, surveyed in list(enumerate(chosen))[rank::2]:
                found[surveyed.name]["single"] = measured(
                    surveyed, "single", folder / f"{number}", folder / f"{number}.pt"
                )
        for strategy in STRATEGIES[1:]:
            for number, surveyed in enumerate(chosen):
                found[surveyed.name][strategy] = measured(
                    surveyed, strategy, folder / f"{number}-{strategy}", folder / f"{number}.pt"
                )
        sys.stdout = shown
    return found


def survey(names: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """What is measured on this machine, by optimizer and strategy; what is not installed is missing.

    Args:
        names: the optimizers; empty: all.
    """
    with tempfile.TemporaryDirectory() as root:
        first, second = ranks_of(on_two_ranks, 2, root, *names, timeout=600.0)
    return {
        name: {strategy: {**second[name].get(strategy, {}), **row.get(strategy, {})} for strategy in STRATEGIES}
        for name, row in first.items()
    }


# -- the record and the chapter's table -----------------------------------------------------------------------------------------------


def recorded(row: Mapping[str, Any]) -> dict[str, Any]:
    """A measurement as the record has it: differences as bounds that other machines keep, too."""
    if "resumed" not in row:
        return dict(row)
    return {
        "resumed": row["resumed"],
        "from one process": next(bound for bound in BOUNDS if row["from one process"] <= bound),
    }


def differs(row: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """How a measurement contradicts the record; empty if it does not."""
    if "resumed" not in row or "resumed" not in record:
        return "" if row == record else f"measured {row}, recorded {record}"
    if row["resumed"] != record["resumed"]:
        return f"resumed with a difference of {row['resumed']}, recorded {record['resumed']}"
    bound = record["from one process"]
    if row["from one process"] > (bound if bound == SAME else 10 * bound):
        return f"differs by {row['from one process']:.1e} from one process, recorded {bound}"
    return ""


def table(record: Mapping[str, Mapping[str, Any]]) -> str:
    """The chapter's table, with a row for all optimizers of a package with the same results, and the errors below it."""
    errors: list[str] = []
    rows: dict[tuple[str, str], list[str]] = {}
    for name, row in record.items():
        code, _, rest = name.partition(" (")
        package, _, remark = (rest or "torch.optim)").partition(")")
        cells = " | ".join(_cell(row[strategy], name, errors) for strategy in STRATEGIES)
        rows.setdefault((package, cells), []).append(code.replace("torch.optim.", "") + remark)
    lines = [f"| {package} | {', '.join(codes)} | {cells} |\n" for (package, cells), codes in rows.items()]
    numbered = [f"({number}) {text}\n" for number, text in enumerate(errors, 1)]
    heading = f"| package | optimizer | `{'` | `'.join(STRATEGIES)}` |\n|---|---|---|---|---|---|\n"
    return "".join([heading, *lines, "\n```text\n", *numbered, "```\n"])


def _cell(row: Mapping[str, Any], name: str, errors: list[str]) -> str:
    if "resumed" in row:
        resumed, bound = row["resumed"], row["from one process"]
        cell = "yes" if bound == SAME else f"yes, {bound:g}"
        return cell if resumed == 0 else f"{cell}; resumed with {resumed:.0e}"
    [(what, text)] = row.items()
    text = _general(text, name)
    if text not in errors:
        errors.append(text)
    return f"{what} ({errors.index(text) + 1})"


def _general(text: str, name: str) -> str:
    """An error without the names of this optimizer's class and parameters, so that those of several optimizers are one."""
    text = text.partition(": ")[2]
    cls = re.findall(r"`_?(\w+)`", name)[0]
    text = re.sub(rf"\b_?{cls}\b", "...", text)
    text = re.sub(r"layers\.\d\.weight", "layers.0.weight", text)
    return re.sub(r"\b\w+\.(?:\w+\.)+(?=[A-Z]\w+)", "", text)


def updated(record: Mapping[str, Mapping[str, Any]]) -> str:
    """The chapter with the table of the record."""
    pattern = r"\| package \| optimizer \| `single` (?s:.*?)\n```text\n(?s:.*?)\n```\n"
    return re.sub(pattern, lambda _: table(record), CHAPTER.read_text(), count=1)


def main(arguments: Sequence[str]) -> int:
    """Measure, and compare or ``--write``; further arguments are names of optimizers to print.

    Returns:
        1 if something is not what is recorded.
    """
    names = [argument for argument in arguments if argument != "--write"]
    rows = survey(names)
    if names:
        print(json.dumps(rows, indent=1))
        return 0
    record = {name: {strategy: recorded(row[strategy]) for strategy in STRATEGIES} for name, row in rows.items()}
    if "--write" in arguments:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        CHAPTER.write_text(updated(record))
        return 0
    saved = json.loads(RECORD.read_text())
    problems = [
        f"{name}, {s}: {p}" for name, row in rows.items() for s in STRATEGIES if (p := differs(row[s], saved[name][s]))
    ]
    print("\n".join(problems))
    return int(bool(problems) or CHAPTER.read_text() != updated(saved))


if __name__ == "__main__":
    # The ranks import it by its name, and not as the main program.
    sys.exit(importlib.import_module("strategies.optimizer_survey").main(sys.argv[1:]))
