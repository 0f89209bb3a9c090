from engine.compat.accelerate.utils.imports import *
