from engine.compat.lightning.utilities import *
