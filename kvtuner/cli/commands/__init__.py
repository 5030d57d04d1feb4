"""The sub-commands, a module for each: they read flags, call the pipeline and print its result."""
