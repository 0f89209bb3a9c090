"""The options of every command of ``fit``, and the checks of them that are possible before the command's module is imported. Imports no torch.

Each parser sets ``run_by`` to the module whose ``run(options)`` does the work and returns the exit status.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from engine.cli.terminal import STATUSES, Parser, UsageError
from engine.config.file_size import size_in_bytes
from engine.config.settings import KINDS
from engine.launch.job import LaunchError, make_job
from engine.utils.errors import nearest
from engine.utils.paths import expanded

_CONFIG = "the file of settings (default: $FIT_CONFIG, then ./fit.yaml if there is one)"
"""The help of ``--config``."""
_WEIGHTS = "'trained', or those that a callback has kept, such as 'ema'; by default those that the checkpoint's score was measured with"
"""The help of ``--weights``."""


class TargetParser(Parser):
    """Options for a command with a TARGET. ``--help`` describes the options if there is no TARGET, and the parameters of its classes if there is
    one."""

    setting = ""
    """The example of a setting in the error for a ``--set`` without a value."""

    def check(self, options: argparse.Namespace) -> None:
        if options.help and not names_objects(options):
            self.print_help()
            sys.stdout.flush()
            self.exit()
        for text in options.set:
            if "=" not in text:
                raise UsageError(
                    f"--set {text}: give NAME=VALUE, as in {self.setting} or model.hidden=64; the target comes before the options"
                )


def names_objects(options: argparse.Namespace) -> bool:
    """Check whether the command line, or the file that it names, may say what is to run."""
    return any((options.target, options.config, options.data, getattr(options, "callback", None)))


# -- run, validate, test, predict ----------------------------------------------------------------------------------------------------


_TARGET = """\
TARGET and CLASS are my.module:Net, net.py:Net, or net.py if it defines one such class. The current directory is importable.
Without TARGET the sections model:, data: and callbacks: of the file of settings define what runs:

  max_epochs: 3
  model:
    class_path: my.module:Net
    init_args: {hidden: 64}
  data:
    class_path: my.module:Digits
  callbacks:
    - ModelCheckpoint
    - class_path: callbacks:EarlyStopping
      init_args: {monitor: val_loss}

'fit COMMAND TARGET --help' lists the parameters of the classes."""

_SETTINGS = textwrap.fill(
    f"Settings of Fit: {', '.join(name for name, kind in KINDS.items() if not kind.code_only)}. "
    "'fit config --default' writes each with its documentation.",
    width=110,
)

_SAVED = "the module is created with its hyperparameters, except those given by --set or the file of settings"

_ABOUT = {
    "run": "Train a TrainModule with data and callbacks, each built from the parameters of its constructor.",
    "validate": "Run the validation loop with a checkpoint's weights and print the metrics.",
    "test": "Run the test loop with a checkpoint's weights and print the metrics. 'fit test' alone checks this installation on this machine's "
    "devices instead: collectives, DDP and FSDP2 against one process, resuming, bf16.",
    "predict": "Run the prediction loop with a checkpoint's weights and write the predictions.",
}


class RunParser(TargetParser):
    """The options of ``fit run``, ``validate``, ``test`` and ``predict``."""

    setting = "max_epochs=3"

    def check(self, options: argparse.Namespace) -> None:
        super().check(options)
        if getattr(options, "hyperparameters", None) and not options.resume:
            raise UsageError("--hyperparameters is for --resume: without it they are those of configure_optimizers")
        is_bare = not (names_objects(options) or options.set or options.print_config)
        if options.command == "test" and is_bare and not options.checkpoint:  # `fit test` alone checks the installation
            options.run_by = "engine.cli.self_check"


def run() -> Parser:
    """The options of ``fit run``."""
    return _loop_options("run")


def validate() -> Parser:
    """The options of ``fit validate``."""
    return _loop_options("validate")


def test() -> Parser:
    """The options of ``fit test``."""
    return _loop_options("test")


def predict() -> Parser:
    """The options of ``fit predict``."""
    return _loop_options("predict")


def _loop_options(command: str) -> RunParser:
    """The parser of ``fit run``, ``validate``, ``test`` or ``predict``."""
    parser = RunParser(
        prog=f"fit {command}",
        description=_ABOUT[command],
        epilog=f"{_TARGET}\n\n{_SETTINGS}\n\n{STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.set_defaults(run_by="engine.cli.run", command=command)
    parser.add_argument("target", nargs="?", metavar="TARGET", help="the TrainModule")
    help_text = "print this; with a target, the parameters of its classes"
    parser.add_argument("-h", "--help", action="store_true", help=help_text)
    parser.add_argument(
        "--data", metavar="CLASS", help="a DataModule, or a class or function that returns a DataLoader"
    )
    parser.add_argument(
        "--callback",
        action="append",
        default=[],
        metavar="CLASS",
        help="a callback; may be repeated; ModelCheckpoint means callbacks:ModelCheckpoint",
    )
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="settings of Fit, model.*, data.*, callbacks.N.* or callbacks.CLASS.*; these win over the environment and the file",
    )
    parser.add_argument("--config", metavar="FILE", help=_CONFIG)
    print_config_help = "print everything that would run as such a file, without running it"
    parser.add_argument("--print-config", action="store_true", help=print_config_help)
    if command == "run":
        parser.add_argument(
            "--resume",
            metavar="CHECKPOINT",
            help=f"last, auto (last, if there is one), best, or a checkpoint's path or URL; {_SAVED}",
        )
        parser.add_argument(
            "--hyperparameters",
            choices=("checkpoint", "configured"),
            help="with --resume: learning rates, weight decays, ... of the optimizers are the checkpoint's (the default), or those that "
            "configure_optimizers gives now",
        )
        return parser
    checkpoint_help = f"last, best, or a checkpoint's path or URL; without it the constructor's weights; {_SAVED}"
    parser.add_argument("--checkpoint", metavar="CHECKPOINT", help=checkpoint_help)
    parser.add_argument("--weights", metavar="NAME", help=_WEIGHTS)
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    if command == "predict":
        parser.add_argument(
            "--output",
            metavar="FILE",
            help="a .safetensors file: tensors over all samples; a .jsonl file: one line per sample",
        )
    return parser


# -- checkpoint ----------------------------------------------------------------------------------------------------------------------


_PLACE = "a directory or a URL that fsspec knows"
_WEIGHTS_ACTIONS = "engine.cli.checkpoint_weights"
"""The module of the subcommands that read tensors, and therefore import torch."""


def checkpoint() -> Parser:
    """The options of ``fit checkpoint``."""
    parser = Parser(
        prog="fit checkpoint",
        description="Inspect, verify, export, convert, pack and remove checkpoints, without running code from them.",
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="list|show|verify|export|convert|pack|prune")

    def add(name: str, text: str, run_by: str = "engine.cli.checkpoint") -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(run_by=run_by)
        command.add_argument("--json", action="store_true", help="print one JSON value")
        return command

    path_help = f"a checkpoint, or a folder, whose newest one is used: {_PLACE}"
    command = add("list", "list the checkpoints of a folder, oldest first; status 1 if one is incomplete or damaged")
    command.add_argument("root", help=_PLACE)

    command = add("show", "print a checkpoint's description")
    command.add_argument("path", help=path_help)
    _checkpoint_of_folder(command)
    command.add_argument(
        "--tensors", action="store_true", help="also each tensor's name, shape, dtype and number of shards"
    )

    command = add(
        "verify", "read all files again and compare them with their checksums; status 1 if something is wrong"
    )
    command.add_argument("paths", nargs="+", metavar="path", help=f"a checkpoint, or a folder with several: {_PLACE}")

    _export(
        add(
            "export",
            "write a checkpoint's weights as .safetensors files that transformers and load_file read",
            _WEIGHTS_ACTIONS,
        ),
        path_help,
    )

    sources = "a Lightning .ckpt, a torch.distributed.checkpoint directory or safetensors"
    _convert(add("convert", f"write a checkpoint of this library from {sources}", _WEIGHTS_ACTIONS))
    command = add(
        "pack",
        "write a checkpoint as one file, from which everything that takes a checkpoint reads it",
        _WEIGHTS_ACTIONS,
    )
    command.add_argument("path", help=path_help)
    command.add_argument("out", help="the file, by convention x.ckpt: a zip archive of the checkpoint's folder")
    _checkpoint_of_folder(command)
    command.add_argument(
        "--pickle",
        action="store_true",
        help="instead a dict for torch.load: weights, hyperparameters and counters under Lightning's keys",
    )
    command.add_argument("--weights", metavar="NAME", help=f"with --pickle: {_WEIGHTS}")
    _prune(
        add("prune", "delete all complete checkpoints of a folder except the newest, and those with the best scores")
    )
    return parser


def _checkpoint_of_folder(command: argparse.ArgumentParser) -> None:
    help_text = "of a folder: best, last (the default), or the name of one, such as step=00000120"
    command.add_argument("--checkpoint", metavar="NAME", help=help_text)


def _convert(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", metavar="in", help=f"a file or a directory, or a URL of one; {_PLACE}")
    command.add_argument("out", help=f"the new checkpoint: {_PLACE}")
    command.add_argument(
        "--trust-pickle",
        action="store_true",
        help="read pickles too (.ckpt, .pt, .distcp): tensors and plain values only, by weights_only=True",
    )


def _prune(command: argparse.ArgumentParser) -> None:
    keep_best_help = "and the N with the best scores of ModelCheckpoint(monitor=)"
    command.add_argument("root", help=_PLACE)
    command.add_argument("--keep", type=_at_least(1), required=True, metavar="N", help="keep the N newest (1 or more)")
    command.add_argument("--keep-best", type=_at_least(0), default=0, metavar="N", help=keep_best_help)
    command.add_argument("--dry-run", action="store_true", help="only print what would be deleted")


def _export(command: argparse.ArgumentParser, path_help: str) -> None:
    command.add_argument("path", help=path_help)
    command.add_argument("out", help=f"where the files go: {_PLACE}")
    _checkpoint_of_folder(command)
    command.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="of floating point tensors; by default unchanged"
    )
    command.add_argument(
        "--max-shard-size",
        type=_size,
        default="5GB",
        metavar="SIZE",
        help="of a file, such as 5GB or 200MiB (default: 5GB)",
    )
    command.add_argument(
        "--prefix-strip",
        metavar="PREFIX",
        help="remove this prefix of names, such as 'model.' (default: what the module has published)",
    )
    command.add_argument("--weights", metavar="NAME", help=_WEIGHTS)
    for name, text in (
        ("include", "only names that match a pattern, such as 'model.*'"),
        ("exclude", "no names that match a pattern"),
    ):
        command.add_argument(f"--{name}", action="extend", nargs="+", default=[], metavar="PATTERN", help=text)


def _size(text: str) -> str:
    """A type for argparse: the size of a file, as text."""
    try:
        size_in_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: give bytes, or text such as '5GB' or '200MiB'"
        ) from None
    return text


def _at_least(low: int) -> Callable[[str], Any]:
    """A type for argparse: an int of at least ``low``."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return int(text)

    return number


# -- report, plan, replay ------------------------------------------------------------------------------------------------------------


def _port(text: str) -> int:
    """A type for argparse: a port."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535; folders come before --serve")
    return int(text)


def report() -> Parser:
    """The options of ``fit report``."""
    parser = Parser(
        prog="fit report",
        description="Write one HTML page about runs, which opens without network: curves, times, configuration, checkpoints, and the differences "
        "between runs. The runs had the callback Report or CSVLogger; they may have been killed, or still be running.",
    )
    parser.set_defaults(run_by="engine.cli.report")
    parser.add_argument(
        "folders", nargs="+", metavar="DIR", help="the folder of a run, or a root_dir, which stands for all of its runs"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the page (default: report.html in the folder of a single run, comparison.html in the first DIR for several)",
    )
    parser.add_argument(
        "--serve",
        nargs="?",
        type=_port,
        const=8321,
        metavar="PORT",
        help="write no page, and serve one on this machine alone that follows runs while they train, until Ctrl-C or SIGTERM (default: 8321; "
        "0: any port that is free)",
    )
    parser.add_argument(
        "--csv",
        metavar="FILE",
        help="write the table of runs as a CSV file, and no page: settings that differ, best score, status, steps, training time (-: print it)",
    )
    parser.add_argument(
        "--max-points",
        type=int,
        default=1_000_000,
        metavar="N",
        help="of all curves; beyond it, long curves keep their peaks only (default: 1000000)",
    )
    return parser


_PLAN_EPILOG = f"""\
TARGET, --data, --set and --config are those of fit run.

DEVICE: a name (h100, h200, b200, a100-80gb, mi300x, ..., cpu), or memory, floating
point operations a second and bytes a second of the memory: 80GiB,1e15,3e12. The
operations may be given by dtype, 80GiB,bf16=1e15,fp32=6e13,3e12, and a name may have
another memory: h100,96GB.
LINKS: bandwidths of one device in one direction, within and between nodes:
450GB/s,50GB/s. The latency of one step of a ring may follow: 450GB/s:2e-6.

{STATUSES}"""
_JOB = ("target", "data", "set", "config", "world_size", "nodes", "device", "network", "memory_limit")
_ONE_PLAN = ("storage", "price", "page")
_BY_MODE = {
    "plan": {*_JOB, *_ONE_PLAN, "json"},
    "search": {*_JOB, "seconds", "json", "search"},
    "measure": {"processes", "json", "measure"},
}
"""The options that apply to one plan, to a search, and to a measurement."""
_NEEDS = {"seconds": "--search", "processes": "--measure"}
_MODE_ERRORS = {
    "search": "--{} is of one plan: give it with the settings that --search has found",
    "measure": "--{} is not for --measure, which measures this machine: give its numbers to a plan with --device and --network",
}


class PlanParser(TargetParser):
    """The options of ``fit plan``."""

    setting = "strategy=fsdp"

    def check(self, options: argparse.Namespace) -> None:
        super().check(options)
        _check_mode(options)
        if options.measure:
            return
        if options.page is not None:
            _check_page(options.page)
        if options.seconds is not None and not options.seconds > 0:
            raise UsageError(f"--seconds {options.seconds:g}: give more than 0")


def plan() -> Parser:
    """The options of ``fit plan``."""
    parser = PlanParser(
        prog="fit plan",
        description="Forecast a training on many ranks: the memory of a rank, what it sends, the time of a step,\n"
        "and whether it fits. The real strategy and optimizer run one step on this machine, in one\n"
        "process, on tensors without values. Nothing is trained, and no checkpoint or log is written.",
        epilog=_PLAN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.set_defaults(run_by="engine.cli.plan")
    _add_job(parser)
    one_plan = parser.add_argument_group("one plan")
    storage_help = "bytes a second at which all ranks together write a checkpoint: 5GB/s"
    one_plan.add_argument("--storage", metavar="RATE", help=storage_help)
    one_plan.add_argument("--price", type=float, metavar="MONEY", help="of one device for one hour, in any currency")
    one_plan.add_argument("--page", metavar="FILE", help="also write an HTML page with a timeline of the memory")
    search = parser.add_argument_group("a search")
    search_help = "try strategies, mesh degrees, micro-batches, recomputation and precisions: what fits, the fastest first, and why the rest does not"
    search.add_argument("--search", action="store_true", help=search_help)
    search.add_argument("--seconds", type=float, metavar="S", help="start no further plan after S seconds")
    machine = parser.add_argument_group("this machine")
    measure_help = "measure this machine's arithmetic, memory and links, and print them for --device and --network"
    machine.add_argument("--measure", action="store_true", help=measure_help)
    processes_help = "ranks between which links are measured (default: one for each device, or 2)"
    machine.add_argument("--processes", type=int, metavar="N", help=processes_help)
    return parser


def _add_job(parser: argparse.ArgumentParser) -> None:
    """Add the options of the job that is planned."""
    parser.add_argument("target", nargs="?", metavar="TARGET", help="the TrainModule")
    help_text = "print this; with a target, the parameters of its classes"
    parser.add_argument("-h", "--help", action="store_true", help=help_text)
    parser.add_argument("--data", metavar="CLASS", help="its data: the first micro-batch gives the shapes")
    set_help = (
        "settings of Fit, model.* and data.*: strategy=fsdp, strategy.tp=8, precision=bf16-mixed, data.batch_size=4"
    )
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="NAME=VALUE", help=set_help)
    parser.add_argument("--config", metavar="FILE", help=_CONFIG)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    cluster = parser.add_argument_group("the cluster")
    world_size_help = "processes of the job, one device each (default: devices x num_nodes of the settings)"
    cluster.add_argument("--world-size", type=int, metavar="N", help=world_size_help)
    cluster.add_argument("--nodes", type=int, metavar="M", help="machines (default: as few as hold the devices)")
    cluster.add_argument("--device", metavar="DEVICE", help="of each rank, see below (default: h100)")
    network_help = "between devices, see below (default: the usual ones of the device)"
    cluster.add_argument("--network", metavar="LINKS", help=network_help)
    limit_help = "memory that a rank may use: 2GiB (default: what the device has)"
    cluster.add_argument("--memory-limit", metavar="SIZE", help=limit_help)


def _check_mode(options: argparse.Namespace) -> None:
    """Refuse options that the requested mode (a plan, a search or a measurement) does not use."""
    mode = next((name for name in ("measure", "search") if getattr(options, name)), "plan")
    for name, value in vars(options).items():
        if name in _BY_MODE[mode] or name in ("help", "run_by") or value in (None, False, []):
            continue
        option = name.replace("_", "-")
        if name == "target":
            raise UsageError(f"--measure takes no target, got {value!r}: it measures this machine")
        if mode == "plan":
            raise UsageError(f"--{option} needs {_NEEDS[name]}")
        raise UsageError(_MODE_ERRORS[mode].format(option))


def _check_page(name: str) -> None:
    """Raise an error for a page that cannot be written, before a plan that may take minutes."""
    if not name.endswith(".html"):
        raise UsageError(f"--page {name}: the page needs a name that ends in .html")
    page = Path(expanded(name))
    folder = next(parent for parent in page.absolute().parents if parent.exists())
    if page.is_dir():
        raise UsageError(f"--page {name}: this is a folder; name a file")
    if not folder.is_dir():
        raise UsageError(f"--page {name}: {folder} is not a folder")
    if not os.access(page if page.exists() else folder, os.W_OK):
        raise UsageError(f"--page {name}: no permission to write there")


def replay() -> Parser:
    """The options of ``fit replay``."""
    parser = Parser(
        prog="fit replay",
        description="Run one step of an earlier training again, from its newest checkpoint before that step, or from its seed if there is none, and "
        "print the samples, the loss of each micro-batch, the norm of the gradients and the first number that is not finite. On as many ranks as "
        "the run had, every number is the same to the last bit. Nothing of the run changes.",
        epilog="TARGET, --data, --callback, --set and --config are those of fit run; the sections model:, data: and callbacks: of a file of "
        "settings serve as well. Settings and parameters that are numbers and words are the run's where nothing else is given. What its "
        "checkpoint names as code is not imported. A script can call Fit.replay.",
        allow_abbrev=False,
    )
    parser.set_defaults(run_by="engine.cli.replay")
    parser.add_argument("run", metavar="RUN", help="the run's folder, or one of its checkpoints; a directory or a URL")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step's number, from 1")
    parser.add_argument("--target", metavar="TARGET", help="the TrainModule of the run")
    parser.add_argument("--data", metavar="CLASS", help="its data")
    callback_help = "a callback of the run that changes a step; may be repeated"
    parser.add_argument("--callback", action="append", default=[], metavar="CLASS", help=callback_help)
    parser.add_argument("--config", metavar="FILE", help=_CONFIG)
    parser.add_argument(
        "--run-recorded-code",
        action="store_true",
        help="import and call what the checkpoint names as model, data and callbacks: only for a run that you made yourself. Prints it first",
    )
    set_help = "settings of Fit, model.*, data.* and callbacks.*, where they differ from the run's"
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="NAME=VALUE", help=set_help)
    parser.add_argument(
        "--detect-anomaly", action="store_true", help="let autograd name the operation whose gradient is not finite"
    )
    parser.add_argument("--per-layer", action="store_true", help="print the norm of each parameter's gradient")
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    return parser


# -- config, migrate, tokens -----------------------------------------------------------------------------------------------------------------


def config() -> Parser:
    """The options of ``fit config``."""
    parser = Parser(
        prog="fit config",
        description="Write a commented file of settings, from answers to questions unless one of the first five options is given.",
    )
    parser.set_defaults(run_by="engine.cli.config")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--default", action="store_true", help="without questions: every setting as a comment with its default"
    )
    modes.add_argument(
        "--from-accelerate",
        nargs="?",
        const="",
        metavar="PATH",
        help="convert Accelerate's configuration file (without PATH: the one that 'accelerate config' writes)",
    )
    modes.add_argument(
        "--from-training-args",
        metavar="FILE",
        help="convert transformers.TrainingArguments, a JSON or YAML file of them",
    )
    modes.add_argument(
        "--from-lightning",
        metavar="FILE",
        help="convert the 'trainer' of a YAML file, such as LightningCLI writes",
    )
    modes.add_argument("--check", metavar="PATH", help="write nothing: check a file of settings")
    parser.add_argument("--output", default="fit.yaml", metavar="PATH", help="the file to write (default: fit.yaml)")
    parser.add_argument(
        "--force",
        action="store_true",
        help="overwrite the file; with --from-..., write settings without a counterpart as comments instead of refusing them",
    )
    return parser


def migrate() -> Parser:
    """The options of ``fit migrate``."""
    parser = Parser(
        prog="fit migrate",
        description="Report where Python files and notebooks use Lightning and Accelerate, and what each use is here: it works as is (with the base "
        "class or import of engine), it works through engine.interop (only the import changes), or it needs a change, which is named. Sources are "
        "read; nothing in them is run or imported.",
    )
    parser.set_defaults(run_by="engine.cli.migrate")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a folder with everything below it")
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out files and folders of this name, such as 'test*'; may be repeated",
    )
    parser.add_argument("--changes", action="store_true", help="print only what needs a change, and the summary")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when something needs a change")
    parser.add_argument("--json", action="store_true", help="print one JSON value, with every use")
    return parser


def tokens() -> Parser:
    """The options of ``fit tokens``."""
    parser = Parser(
        prog="fit tokens",
        description="Write the tokens of texts to a file that engine.TokenFile reads, in one pass. The file appears when it is complete.",
        epilog="A shard each: run the command once for each input, and give engine.TokenFile the folder of the outputs.",
    )
    parser.set_defaults(run_by="engine.cli.tokens")
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="texts: .txt (a document each), .jsonl and .jsonl.gz (a document each line), .parquet (a document each row)",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="NAME",
        help="a name or folder for transformers' AutoTokenizer, a tokenizer.json, or my.module:name of a tokenizer or a function from a text to its "
        "tokens",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write, .safetensors")
    parser.add_argument(
        "--column", default="text", metavar="NAME", help="the column with texts in .jsonl and .parquet (default: text)"
    )
    parser.add_argument("--lines", action="store_true", help="each line of a .txt that is not empty is a document")
    parser.add_argument(
        "--end-token", metavar="N", help="a token that is added after each document; eos: the tokenizer's eos_token_id"
    )
    parser.add_argument(
        "--dtype",
        choices=("uint8", "uint16", "uint32"),
        help="the dtype of tokens (default: uint32 if the tokenizer says that it has more than 65,536 tokens, else uint16)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    return parser


# -- launch --------------------------------------------------------------------------------------------------------------------------


class LaunchParser(Parser):
    """The options of ``fit launch``; the error for an unknown option names the nearest one."""

    def error(self, message: str) -> NoReturn:
        unknown = (
            message.removeprefix("unrecognized arguments: ").split("=")[0].split(" ")[0]
            if message.startswith("unrecognized")
            else ""
        )
        super().error(f"{message}{nearest(unknown, self._option_string_actions) if unknown else ''}")

    def check(self, options: argparse.Namespace) -> None:
        """Raise an error for a job that cannot be started. Without a cluster, ``options.job`` becomes the job that this machine starts."""
        try:
            self._check_cluster(options)
            if options.slurm or options.ray:
                options.run_by = "engine.cli.launch_on_cluster"
            else:
                options.job = make_job(options, os.environ)
        except LaunchError as error:
            self.error(str(error))

    def _check_cluster(self, options: argparse.Namespace) -> None:
        """Raise ``LaunchError`` for options that have no effect with this launcher."""
        if options.slurm and options.ray:
            raise LaunchError("--slurm and --ray: give one of them")
        kind = "slurm" if options.slurm else "ray" if options.ray else ""
        without_effect = () if kind == "slurm" else (*_SLURM_ONLY, "no_requeue", "slurm_option")
        for name in (*_WITHOUT_EFFECT.get(kind, ("ray_address",)), *without_effect):
            if getattr(options, name) != self.get_default(name):
                condition = (
                    f"with --{kind}" if kind else "without --ray" if name == "ray_address" else "without --slurm"
                )
                raise LaunchError(f"--{name.replace('_', '-')} has no effect {condition}")


def launch() -> Parser:
    """The options of ``fit launch``."""
    parser = LaunchParser(
        prog="fit launch",
        usage="fit launch [options] script.py [arguments of the script]\n       fit launch [options] -m package.module [arguments]\n"
        "       fit launch [options] --no-python program [arguments]",
        description="Start a script as the processes (ranks) of one job, on this machine or on several, monitor and restart them.",
        epilog="torchrun's variables (PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT, PET_RDZV_ENDPOINT, "
        "PET_RDZV_ID, PET_MAX_RESTARTS) are the defaults of the options. Exit status: 0 success; 1 a rank failed; 2 wrong arguments; "
        "130 Ctrl-C; 143 SIGTERM.",
        allow_abbrev=False,
    )
    parser.set_defaults(run_by="engine.cli.launch")
    _add_processes(parser)
    _add_failures(parser)
    _add_output(parser)
    _add_clusters(parser)
    program = parser.add_argument_group("what is run")
    kind = program.add_mutually_exclusive_group()
    kind.add_argument("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    kind.add_argument("--no-python", action="store_true", help="the script is any program")
    program.add_argument("script")
    program.add_argument("args", nargs=argparse.REMAINDER)
    return parser


def _add_processes(parser: argparse.ArgumentParser) -> None:
    processes = parser.add_argument_group("processes")
    processes.add_argument("--nproc", metavar="N", help="processes on this machine: a number, 'gpu' (one per GPU), 'cpu' (one per core), "
                       "'auto' (one per GPU, or one); default: auto")  # fmt: skip
    processes.add_argument(
        "--nnodes",
        metavar="N|MIN:MAX",
        help="machines; with MIN:MAX the job continues while MIN are left and grows again; default: 1",
    )
    processes.add_argument(
        "--node-rank", metavar="R", help="fix this machine's number, 0 to N-1; machine 0 serves the rendezvous"
    )
    processes.add_argument(
        "--rdzv",
        metavar="HOST:PORT",
        help="the rendezvous of the machines: a port of one of them; not needed for one machine",
    )
    processes.add_argument(
        "--rdzv-id",
        metavar="ID",
        help="the name at the rendezvous, the same on all machines; default: fit (one machine: random)",
    )


def _add_failures(parser: argparse.ArgumentParser) -> None:
    failures = parser.add_argument_group("failures")
    failures.add_argument(
        "--max-restarts", metavar="K", help="restart all ranks up to K times when one fails; default: 0"
    )
    failures.add_argument(
        "--grace",
        metavar="S",
        type=float,
        default=120.0,
        help="seconds that ranks get to save after SIGTERM or Ctrl-C; default: 120",
    )
    failures.add_argument(
        "--dead-after",
        metavar="S",
        type=int,
        default=10,
        help="seconds without an answer after which a machine is considered dead; default: 10",
    )
    failures.add_argument(
        "--join-wait",
        metavar="S",
        type=int,
        default=5,
        help="seconds to wait for more machines once MIN have joined; default: 5",
    )
    failures.add_argument(
        "--join-timeout",
        metavar="S",
        type=int,
        default=600,
        help="seconds to wait for the machines to join; default: 600",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    out = parser.add_argument_group("settings and output")
    out.add_argument(
        "--config", metavar="FILE", type=Path, help="the YAML file of settings, for every rank (its FIT_CONFIG)"
    )
    out.add_argument(
        "--log-dir",
        metavar="DIR",
        type=Path,
        help="the parent of a new directory with a file per rank; default: runs/logs",
    )
    out.add_argument(
        "--show",
        metavar="RANKS",
        default="all",
        help="whose output is shown here: 'all', 'none', or '0,3'; default: all",
    )


def _add_clusters(parser: argparse.ArgumentParser) -> None:
    slurm = parser.add_argument_group(
        "SLURM", "submit a job whose tasks are the ranks; --nproc is its tasks on each node, --nnodes its nodes"
    )
    slurm.add_argument("--slurm", action="store_true", help="write an sbatch script and submit it")
    slurm.add_argument("--dry-run", action="store_true", help="print the script instead")
    for name, help in (
        ("job-name", "default: the script's name"),
        ("gpus-per-node", "also the default of --nproc"),
        ("cpus-per-task", "cores of each rank, and its OMP_NUM_THREADS"),
        *((name, "") for name in ("mem", "time", "partition", "account", "qos")),
        ("output", "default: runs/logs/NAME-JOB.out"),
        ("signal", "TERM@SECONDS before the time limit the ranks save and end; default: TERM@GRACE"),
    ):
        slurm.add_argument(f"--{name}", metavar="X", help=f"as for sbatch{'; ' if help else ''}{help}")
    slurm.add_argument(
        "--no-requeue", action="store_true", help="do not requeue the job after SIGTERM or the loss of a node"
    )
    slurm.add_argument(
        "--slurm-option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any other option of sbatch; may be repeated",
    )
    ray = parser.add_argument_group("Ray")
    ray.add_argument(
        "--ray",
        action="store_true",
        help="run the ranks as workers of Ray Train; --nproc is their number, on all machines together",
    )
    ray.add_argument(
        "--ray-address", metavar="ADDRESS", help="the cluster; default: RAY_ADDRESS, else a new one on this machine"
    )


_WITHOUT_EFFECT = {
    "slurm": ("node_rank", "rdzv", "rdzv_id", "dead_after", "join_wait", "join_timeout", "show", "ray_address"),
    "ray": (
        "nnodes",
        "node_rank",
        "rdzv",
        "rdzv_id",
        "grace",
        "dead_after",
        "join_wait",
        "join_timeout",
        "show",
        "no_python",
    ),
}
_SLURM_ONLY = (
    "dry_run",
    "job_name",
    "gpus_per_node",
    "cpus_per_task",
    "mem",
    "time",
    "partition",
    "account",
    "qos",
    "output",
    "signal",
)


# -- env, completion -----------------------------------------------------------------------------------------------------------------


def env() -> Parser:
    """The options of ``fit env``."""
    parser = Parser(
        prog="fit env", description="Print versions, devices, environment, and each setting with its origin."
    )
    parser.set_defaults(run_by="engine.cli.env")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


_COMPLETION_LINES = """\
in ~/.bashrc:
  eval "$(fit completion bash)"
in ~/.zshrc, after compinit:
  eval "$(fit completion zsh)"
in ~/.config/fish/config.fish:
  fit completion fish | source"""
"""Each line alone, so that it can be copied."""


def completion() -> Parser:
    """The options of ``fit completion``."""
    parser = Parser(
        prog="fit completion",
        description="Print a script that completes commands, options, settings and their values.",
        epilog=_COMPLETION_LINES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run_by="engine.cli.completion")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser
