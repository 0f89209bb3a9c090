"""The training that is killed, started as a user's script: ``python job.py STRATEGY DEVICES DIARIES RECIPE MODEL``."""

from __future__ import annotations

import sys
from pathlib import Path

from recipes import RECIPES
from watch import Watch

if __name__ == "__main__":
    watch = Watch()
    # After the watch: importing torch is a part of the start in which the process may be killed.
    import models
    import training

    watch.event("start", "imported")
    recipe = next(recipe for recipe in RECIPES if recipe.name == sys.argv[4])
    module = models.MODELS[sys.argv[5]](watch)
    training.run(watch, module, recipe, sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
