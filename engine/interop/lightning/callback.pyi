from engine.compat.lightning.callback import *
