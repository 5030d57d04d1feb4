"""What answers: a model that is loaded here, or a server."""
