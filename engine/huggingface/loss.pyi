from engine.compat.transformers.loss import *
