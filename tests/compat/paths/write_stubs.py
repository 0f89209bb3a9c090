"""Write the ``.pyi`` files beside ``engine.interop`` and ``engine.huggingface``: type checkers and editors follow them to ``engine.compat``.

    python tests/compat/paths/write_stubs.py

At run time the modules are found by ``engine.interop.Moved``. ``test_old_paths.py`` fails when a file is out of date.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {
    "engine.interop.lightning": (
        "engine.compat.lightning",
        "callback callbacks cli core loggers module strategies trainer tuner utilities",
    ),
    "engine.interop.accelerate": (
        "engine.compat.accelerate",
        "accelerator big_modeling data_loader hooks launchers local_sgd logging optimizer scheduler state tracking",
    ),
    "engine.interop.accelerate.utils": (
        "engine.compat.accelerate.utils",
        "dataclasses environment imports memory operations other random tqdm versions",
    ),
    "engine.huggingface": ("engine.compat.transformers", "files loss module optimizers pretrained"),
}
"""By package that users import: the package that has its modules, and the modules that users know."""
OTHERWISE = {"engine.compat.lightning.core": "engine.compat.lightning.module"}
"""Modules whose content has another name."""


def stubs() -> dict[Path, str]:
    """The text of each file."""
    return {
        ROOT / Path(*package.split("."), f"{name}.pyi"): (
            f"from {OTHERWISE.get(f'{content}.{name}', f'{content}.{name}')} import *\n"
        )
        for package, (content, names) in PACKAGES.items()
        for name in names.split()
    }


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text)
