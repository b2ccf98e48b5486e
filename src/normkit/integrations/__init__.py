"""normkit with other libraries: each file needs its own, and says which extra brings it."""
