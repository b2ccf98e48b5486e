"""Switches that a benchmark turns, until it is known which of them pay."""

OVERLAP = True
PREFETCH = True
SWEEP = True
LOADS = ""
STORES = ""
UNROLL = 8
HALF = True
WARPS = True  # more warps for coefficients
FLAT = True  # short odd rows as runs
BIG = 1  # times the tile and the warps
COLUMNS = 256
ROW = 2048
PLACES = 4
SMALL = (16, 128)  # tile of maps of 33 to 64 positions
