from engine.compat.accelerate.hooks import *
