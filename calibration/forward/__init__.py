"""Running a model layer by layer, exactly or as if its cache were quantized. Knows nothing of data or bits."""
