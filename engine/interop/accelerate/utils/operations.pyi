from engine.compat.accelerate.utils.operations import *
