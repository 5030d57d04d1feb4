"""What we need of SGLang, a module for each part: the only place that names its private functions."""
