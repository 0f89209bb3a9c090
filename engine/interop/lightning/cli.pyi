from engine.compat.lightning.cli import *
