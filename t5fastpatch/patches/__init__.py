"""One file a patch; each holds its `PATCH`."""
