"""What kernels do with keys alone: scores of a block of them, and groups of tokens packed per channel."""
