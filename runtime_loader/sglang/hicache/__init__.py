"""SGLang's hierarchical cache with packed pages: host pool, storage and what a page must be."""
