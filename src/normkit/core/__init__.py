"""What a normalizer is made of: moments, coefficients, layouts, cards. No layer, no backend."""
