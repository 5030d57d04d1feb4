"""The parts of the second pass over all layers: gradients from the last layer to the first, and exact attention."""
