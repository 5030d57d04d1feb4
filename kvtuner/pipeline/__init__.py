"""What strings the stages together: a search, an evaluation, a benchmark. Knows nothing of command lines."""
