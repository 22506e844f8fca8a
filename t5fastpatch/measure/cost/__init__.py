"""Predictions of times, from counts alone."""
