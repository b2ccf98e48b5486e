"""The passes and coefficients as loops in C++, for CPUs."""
