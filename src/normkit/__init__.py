from normkit.layers import *
from normkit.layers.bn import BN
