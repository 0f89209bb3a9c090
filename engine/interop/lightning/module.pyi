from engine.compat.lightning.module import *
