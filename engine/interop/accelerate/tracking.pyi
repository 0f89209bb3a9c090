from engine.compat.accelerate.tracking import *
