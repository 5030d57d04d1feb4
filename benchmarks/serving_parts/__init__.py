"""The parts of engine.py and of hicache.py that serve models."""
