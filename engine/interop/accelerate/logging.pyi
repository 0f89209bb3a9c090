from engine.compat.accelerate.logging import *
