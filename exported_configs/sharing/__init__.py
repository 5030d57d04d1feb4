"""How a profile is named, found, pulled, kept and pushed."""
