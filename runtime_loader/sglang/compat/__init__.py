"""The seams of SGLang, a module each: the only place that names its private functions. Tested with 0.5.23."""
