"""The sub-commands: each module reads flags, calls the pipeline and prints its result. Private to `kvtuner.cli`.

`kvtuner.cli.parser.COMMANDS` names them. Nothing heavy is imported before a command runs.
"""
