from engine.compat.accelerate.scheduler import *
