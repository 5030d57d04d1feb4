"""Programs that make what the tree ships: the demo model, its corpus, the catalogue. No package uses them."""
