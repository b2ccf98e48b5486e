"""What torch.compile gets of a layer."""
