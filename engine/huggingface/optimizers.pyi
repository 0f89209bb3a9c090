from engine.compat.transformers.optimizers import *
