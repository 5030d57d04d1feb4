"""Measures what a scheme costs in quality. Knows nothing of how a profile was found, and writes no report.

Other packages use `cache_scheme` (`CacheScheme`, `named_schemes`, and the names of schemes), `validation`
(`Validator`, `SequenceSums`), `statistics`, `token_text` (`Text`), `backends` and `tasks`. `cells` is private.
"""
