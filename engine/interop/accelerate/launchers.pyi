from engine.compat.accelerate.launchers import *
