"""An engine without a server: a transformers model over a paged pool of packed rows, many requests at a time.

Other packages use `local_engine` (`LocalEngine`), `async_engine` (`AsyncEngine`), `engine_options` (`EngineOptions`)
and `generation` (`SamplingParameters`, `Completion`, `Delta`). docs/engine.md follows a request through it.
"""
