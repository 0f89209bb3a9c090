from engine.compat.accelerate.optimizer import *
