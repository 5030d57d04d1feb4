"""Sequences with images: the tokens that stand for them, and what a decoder reads of them."""
