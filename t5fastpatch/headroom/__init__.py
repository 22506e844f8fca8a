"""How far a model stays from fp16's largest number: bounded from its weights, or observed on data."""
