from engine.compat.accelerate.utils.other import *
