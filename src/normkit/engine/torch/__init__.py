"""The passes in plain torch, for any device."""
