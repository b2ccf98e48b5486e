"""The passes in Triton."""
