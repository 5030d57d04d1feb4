"""The place of a model's weights: devices of this machine, or the ranks of a group, each with a part of them."""
