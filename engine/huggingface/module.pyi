from engine.compat.transformers.module import *
