from engine.compat.accelerate.utils.versions import *
