from engine.compat.accelerate.utils.random import *
