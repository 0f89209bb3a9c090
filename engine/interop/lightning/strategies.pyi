from engine.compat.lightning.strategies import *
