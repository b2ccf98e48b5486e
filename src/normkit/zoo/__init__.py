"""Conversion tried on the models that people use: all of timm and torchvision."""
