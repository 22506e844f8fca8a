"""Measuring: what a call costs in operations and time, and what a patch changes in a model's results."""
