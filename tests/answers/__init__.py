"""What each layer must compute, in NumPy float64 and written from the formulas, not from the code.

Every answer is a function of (x, state, options, training): the input, the parameters and buffers
before the forward as arrays, the options the layer was made with, and the mode. Loops are
preferred to clever indexing: a reader should be able to hold each line against the paper.
"""
