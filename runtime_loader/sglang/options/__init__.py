"""Options of SGLang that a packed pool does not work with, and their refusal before anything is loaded."""
