"""Diseases: faults injected into small trained models, to test what a diagnosis finds."""
