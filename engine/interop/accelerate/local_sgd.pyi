from engine.compat.accelerate.local_sgd import *
