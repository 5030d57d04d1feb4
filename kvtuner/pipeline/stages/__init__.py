"""The stages of a search: what it runs on, its targets, the winner of each, the comparison, the profile, the report."""
