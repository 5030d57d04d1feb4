"""What a command says on stderr while it works: `bar` (`ProgressBar`), `transformers_output` (`quiet_transformers`)."""
