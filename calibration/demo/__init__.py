"""The demo model, its corpus, and the programs that make both. No other package imports the programs."""
