from engine.compat.transformers.pretrained import *
