"""``fit completion SHELL`` prints a script for a shell, which calls the hidden ``fit complete WORDS`` for possible next words."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib.metadata import entry_points

from engine.cli import main as cli
from engine.cli.targets import CALLBACKS
from engine.config.name_and_options import PRECISIONS
from engine.config.settings import Settings

_BASH = """\
# fit's completion for bash 4.3 or later. In ~/.bashrc: eval "$(fit completion bash)"
_fit_complete() {
    local line="${COMP_LINE:0:COMP_POINT}" words current
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    current="${words[-1]}"
    mapfile -t COMPREPLY < <("$1" complete "${words[@]:1}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[0]}" == *[=.] ]] && compopt -o nospace
    # Readline begins a new word after these.
    local done="${current%"${current##*[=:]}"}"
    COMPREPLY=("${COMPREPLY[@]#"$done"}")
}
complete -o default -F _fit_complete fit
"""
_ZSH = """\
#compdef fit
# fit's completion for zsh. In ~/.zshrc, after compinit: eval "$(fit completion zsh)"
_fit() {
    local -a found open
    found=("${(@f)$("${words[1]}" complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -z "${found[*]}" ]]; then
        compset -P '*='
        _files
        return
    fi
    open=("${(@M)found:#*[=.]}")
    found=("${(@)found:#*[=.]}")
    (( ${#open} )) && compadd -S '' -a open
    (( ${#found} )) && compadd -a found
}
if [[ "${funcstack[1]}" == _fit ]]; then _fit "$@"; else compdef _fit fit; fi
"""
_FISH = """\
# fit's completion for fish. In ~/.config/fish/config.fish: fit completion fish | source
function __fit_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l found ($words[1] complete $words[2..-1] 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c fit -f -a '(__fit_complete)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

_FLAG = ("true", "false")
VALUES: dict[str, tuple[str, ...]] = {
    "strategy": (
        *(
            "auto",
            "single",
            "ddp",
            "fsdp",
            "tp",
            "pp",
            "mesh",
            "deepspeed",
            "deepspeed_stage_0",
            "deepspeed_stage_1",
            "deepspeed_stage_2",
        ),
        *("deepspeed_stage_2_offload", "deepspeed_stage_3", "deepspeed_stage_3_offload"),
    ),
    "precision": tuple(PRECISIONS),
    "accelerator": ("auto", "cpu", "cuda"),
    "devices": ("auto",),
    "gradient_clip_algorithm": ("norm", "value"),
    "fast_dev_run": _FLAG,
    "activation_checkpointing": ("full", "selective", "null"),
    "compile": (*_FLAG, "blocks"),
    "sync_batchnorm": _FLAG,
    "deterministic": (*_FLAG, "warn"),
    "benchmark": (*_FLAG, "null"),
    "detect_anomaly": _FLAG,
    "check": _FLAG,
    "debug": _FLAG,
    "on_nonfinite": ("raise", "skip", "null"),
}
"""Possible values of settings that have only a few."""
WORDS = {"resume": ("last", "auto", "best"), "checkpoint": ("last", "best")}
"""Words that options accept besides paths."""


def main(argv: Sequence[str]) -> int:
    """Print the script of one shell."""
    print(SCRIPTS[parser().parse_args(list(argv)).shell], end="")
    return 0


def parser() -> argparse.ArgumentParser:
    """The one argument."""
    top = argparse.ArgumentParser(
        prog="fit completion",
        description="Print a script that completes commands, options, settings and their values.",
        epilog='bash: eval "$(fit completion bash)"    zsh: eval "$(fit completion zsh)"    fish: fit completion fish | source',
    )
    top.add_argument("shell", choices=SCRIPTS)
    return top


def complete(argv: Sequence[str]) -> int:
    """Print possible completions of the last of these words, one per line; nothing for a path."""
    for candidate in candidates(argv):
        print(candidate)
    return 0


def candidates(words: Sequence[str]) -> list[str]:
    """Possible completions of the last word, given those before it; empty for a path, or if anything is possible."""
    *before, current = words or [""]
    if not before:
        return _fitting(current, [*cli.COMMANDS, *_options(cli.parser())])
    at = _parser(before[0])
    if at is None:
        return []
    for word in before[1:]:
        at = next(
            (
                each.choices[word]
                for each in at._actions
                if isinstance(each, argparse._SubParsersAction) and word in each.choices
            ),
            at,
        )
    option = _open_option(at, before[1:])
    if current.startswith("-"):
        return _fitting(current, _options(at))
    if option is not None:
        return _fitting(current, _values(option, current))
    return _fitting(
        current, [name for action in at._actions if not action.option_strings for name in action.choices or ()]
    )


def _parser(command: str) -> argparse.ArgumentParser | None:
    """The parser of a command's own arguments."""
    if command not in cli.COMMANDS:
        return None
    make = importlib.import_module(cli.COMMANDS[command][0].partition(":")[0]).parser
    found: argparse.ArgumentParser = make(command) if inspect.signature(make).parameters else make()
    return found


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings if name.startswith("--")]


def _open_option(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Action | None:
    """The option whose value comes next."""
    for count, word in enumerate(reversed(words)):
        if word.startswith("-"):
            action = next((each for each in parser._actions if word in each.option_strings), None)
            takes = action is not None and action.nargs != 0 and (count == 0 or action.nargs in ("+", "*"))
            return action if takes else None
    return None


def _values(option: argparse.Action, current: str) -> Iterable[str]:
    if option.dest == "callback":
        return [*importlib.import_module(CALLBACKS).__all__]
    if option.dest != "set":
        return map(str, option.choices or WORDS.get(option.dest, ()))
    name, equals, _ = current.partition("=")
    if not equals:
        return [
            *(f"{each.name}=" for each in fields(Settings) if each.name != "callbacks"),
            "model.",
            "data.",
            "callbacks.",
        ]
    found = VALUES.get(name, ())
    if name == "strategy":
        found += tuple(point.name for point in entry_points(group="engine.strategies"))
    return (f"{name}={value}" for value in found)


def _fitting(current: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(current)]
