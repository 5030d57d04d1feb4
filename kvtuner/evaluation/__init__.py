"""Measures what a scheme costs in quality. Knows nothing of how a profile was found, and writes no report.

Other packages use `cache_scheme` (`CacheScheme`, the names of schemes), `scheme_registry` (`named_schemes`),
`validation` (`Validator`, `SequenceSums`), `statistics`, `backends` and `tasks`. `cells` is private.
"""
