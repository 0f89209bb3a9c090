"""What stands at a path where a checkpoint was looked for, as the reason in an error."""

from __future__ import annotations

import os
from pathlib import Path

from engine.checkpoint.manifest import FOLDERS, MANIFEST
from engine.utils.text import terminal_text

_SHOWN = 5
"""Names of a folder's entries that are shown."""
_CONVERT = "fit checkpoint convert {} OUT makes a checkpoint of its weights"
_OTHERS = (
    ("a checkpoint of DeepSpeed", ("latest", "zero_to_fp32.py", "mp_rank_00_model_states.pt"), "zero_to_fp32.py, which "
     "DeepSpeed writes beside it, makes a file of its weights, and fit checkpoint convert FILE OUT a checkpoint of that"),
    ("a checkpoint of torch.distributed.checkpoint", (".metadata",), _CONVERT + ", with --trust-pickle"),
    ("a checkpoint of Accelerate", ("random_states_0.pkl", "optimizer.bin"), _CONVERT),
    ("a checkpoint of transformers' Trainer", ("trainer_state.json",), _CONVERT),
    ("a model of Hugging Face", ("config.json", "model.safetensors", "model.safetensors.index.json"), _CONVERT),
    ("a folder of Lightning", ("hparams.yaml", "last.ckpt"), "fit checkpoint convert FILE.ckpt OUT makes a checkpoint of one of its files"),
)  # fmt: skip
"""Other libraries' folders, files that one of them has, and what to do with it."""


def reason(directory: Path) -> str:
    """Why there is no checkpoint at ``directory``, and what to do: the path is wrong, a copy is incomplete, or another library has written it."""
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return _absent(directory)
    except (OSError, ValueError) as error:
        return f"it cannot be read: {terminal_text(error)}"
    if not names:
        return "it is an empty folder"
    if any(next(directory.glob(pattern), None) for pattern in ("rank=*", *(f"{folder}/rank=*" for folder in FOLDERS))):
        return f"its other files are there, so a copy or a save, which writes {MANIFEST} last, was cut off: copy it again, or give another one"
    for kind, markers, advice in _OTHERS:
        if any(name in names for name in markers):
            return f"it looks like {kind}; {advice.format(terminal_text(directory))}"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return terminal_text(f"it has {', '.join(names[:_SHOWN])}{more}")


def _absent(directory: Path) -> str:
    """The reason where nothing is at ``directory``."""
    if directory.is_symlink():
        return f"it is a link to {terminal_text(os.readlink(directory))}, which does not exist"
    first = directory
    while not first.parent.exists():
        first = first.parent
    if first.parent.is_file():
        return f"{terminal_text(first.parent)} is a file"
    return f"{terminal_text(first)} does not exist; if it was moved or renamed, give its new path"
