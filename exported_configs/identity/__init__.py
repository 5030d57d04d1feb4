"""The identity of a model in a profile, and its comparison with another model."""
