from engine.compat.lightning.callbacks import *
