from engine.compat.transformers.files import *
