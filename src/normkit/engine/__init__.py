"""The only code that touches activations."""
