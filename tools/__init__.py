"""What proves normkit and is not part of it: run from the root of the repository."""
