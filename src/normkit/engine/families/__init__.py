"""Layers whose coefficients Triton makes in one kernel. Only imported where Triton is."""
