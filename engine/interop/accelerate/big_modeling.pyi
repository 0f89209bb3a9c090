from engine.compat.accelerate.big_modeling import *
