from engine.compat.lightning.loggers import *
