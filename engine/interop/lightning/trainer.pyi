from engine.compat.lightning.trainer import *
