from engine.compat.lightning.tuner import *
