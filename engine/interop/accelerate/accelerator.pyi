from engine.compat.accelerate.accelerator import *
