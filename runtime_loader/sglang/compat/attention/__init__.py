"""SGLang's attention: the backends whose metadata ours read, and its flash attention."""
