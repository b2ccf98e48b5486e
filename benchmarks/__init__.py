"""How fast and how lean the layers are, next to torch.nn and to their straightforward form."""
