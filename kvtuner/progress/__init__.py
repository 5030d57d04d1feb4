"""How far a loop is, on stderr: `bar.ProgressBar`, for every package."""
