"""The parts of the programs that measure searches."""
