"""Reports of an ablation, made of its file alone: nothing here knows a model, nor torch."""
