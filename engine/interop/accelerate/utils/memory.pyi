from engine.compat.accelerate.utils.memory import *
