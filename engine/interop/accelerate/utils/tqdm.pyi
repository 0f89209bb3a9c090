from engine.compat.accelerate.utils.tqdm import *
