from engine.compat.accelerate.data_loader import *
