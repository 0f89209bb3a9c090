from engine.compat.accelerate.utils.dataclasses import *
