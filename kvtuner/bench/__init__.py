"""What a served profile is worth: load, figures, sanity gates and a report."""
