from callbacks import *
