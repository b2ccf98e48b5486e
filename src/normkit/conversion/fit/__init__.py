"""Conversions fitted on a few unlabelled images, so that the new network gives what the old did."""
