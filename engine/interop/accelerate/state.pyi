from engine.compat.accelerate.state import *
