from engine.compat.accelerate.utils.environment import *
