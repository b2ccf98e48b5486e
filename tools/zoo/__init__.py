"""Conversion tried on the models that people use: those of timm and torchvision."""
