"""``fit run``, ``validate``, ``test`` and ``predict``: the options. The work needs torch, and is imported when they are valid."""

from __future__ import annotations

import argparse
import importlib
import textwrap
from collections.abc import Sequence

from engine.cli.checkpoint import WEIGHTS
from engine.cli.terminal import STATUSES, Parser, UsageError
from engine.config.settings import KINDS

ACTIONS = "engine.cli.run_actions"
"""The module that does it."""
SELF_CHECK = "engine.cli.self_check"
"""What ``fit test`` does without a target."""

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


def main(argv: Sequence[str]) -> int:
    """``fit run``."""
    return _main("run", argv)


def validate(argv: Sequence[str]) -> int:
    """``fit validate``."""
    return _main("validate", argv)


def test(argv: Sequence[str]) -> int:
    """``fit test``: the test loop of a target, or the check of the installation."""
    return _main("test", argv)


def predict(argv: Sequence[str]) -> int:
    """``fit predict``."""
    return _main("predict", argv)


def _main(command: str, argv: Sequence[str]) -> int:
    top = parser(command)
    arguments = top.parse_args(list(argv))
    described = any((arguments.target, arguments.config, arguments.data, arguments.callback))
    if arguments.help and not described:
        top.print_help()
        return 0
    for text in arguments.set:
        if "=" not in text:
            raise UsageError(
                f"--set {text}: give NAME=VALUE, as in max_epochs=3 or model.hidden=64; the target comes before the options"
            )
    if command == "test" and not (described or arguments.set or arguments.checkpoint or arguments.print_config):
        return int(importlib.import_module(SELF_CHECK).main(as_json=arguments.json))
    return int(importlib.import_module(ACTIONS).run(command, arguments))


def parser(command: str) -> argparse.ArgumentParser:
    """The options of ``fit run``, ``validate``, ``test`` or ``predict``."""
    top = Parser(
        prog=f"fit {command}",
        description=_ABOUT[command],
        epilog=f"{_TARGET}\n\n{_SETTINGS}\n\n{STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    top.add_argument("target", nargs="?", metavar="TARGET", help="the TrainModule")
    about = "print this; with a target, the parameters of its classes"
    top.add_argument("-h", "--help", action="store_true", help=about)
    top.add_argument("--data", metavar="CLASS", help="a DataModule, or a class or function that returns a DataLoader")
    top.add_argument(
        "--callback",
        action="append",
        default=[],
        metavar="CLASS",
        help="a callback; may be repeated; ModelCheckpoint means callbacks:ModelCheckpoint",
    )
    top.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="settings of Fit, model.*, data.*, callbacks.N.* or callbacks.CLASS.*; these win over the environment and the file",
    )
    file = "the file of settings (default: $FIT_CONFIG, then ./fit.yaml if there is one)"
    top.add_argument("--config", metavar="FILE", help=file)
    shown = "print everything that would run as such a file, without running it"
    top.add_argument("--print-config", action="store_true", help=shown)
    if command == "run":
        top.add_argument(
            "--resume",
            metavar="CHECKPOINT",
            help=f"last, auto (last, if there is one), best, or a checkpoint's path or URL; {_SAVED}",
        )
        return top
    text = f"last, best, or a checkpoint's path or URL; without it the constructor's weights; {_SAVED}"
    top.add_argument("--checkpoint", metavar="CHECKPOINT", help=text)
    top.add_argument("--weights", metavar="NAME", help=WEIGHTS)
    top.add_argument("--json", action="store_true", help="print one JSON value")
    if command == "predict":
        top.add_argument(
            "--output",
            metavar="FILE",
            help="a .safetensors file: tensors over all samples; a .jsonl file: one line per sample",
        )
    return top
