"""All that we need of SGLang, a module for each part: the only place that names its private functions.

Private to `runtime_loader.sglang`. Each module compares signatures when it hooks or calls what SGLang may change.
Knows nothing of profiles.
"""
