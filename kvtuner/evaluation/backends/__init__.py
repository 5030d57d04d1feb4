"""Backends: a model that is loaded here, or a server. Knows nothing of which questions it answers.

Other packages use `base` (`Backend`, `TextTokenizer`), `local_backend` (`LocalBackend`), `server_backend`
(`server_backends`) and `endpoint` (`Endpoint`, `Api`).
"""
