"""What a person sees of results: pages, pictures, tables and text. Measures nothing."""
