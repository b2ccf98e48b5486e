"""Simulated experiments: which interval to use, and how often verdicts are wrong."""
