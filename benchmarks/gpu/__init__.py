"""What normkit costs on a GPU, in one run of one version: docs/benchmark-gpu.md is made of it."""
