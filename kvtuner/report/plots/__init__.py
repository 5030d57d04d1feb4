"""Pictures of results, as PNG bytes. Knows nothing of pages."""
