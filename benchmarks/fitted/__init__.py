"""What a fitted conversion is worth: the figures of docs/fitted-conversion.md."""
