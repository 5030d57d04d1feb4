"""The local engine at work for commands: its flags, its model and profile, prompts and answers in order.

Other packages use `engine_flags` (`GenerateFlags`), `opened_engine` (`open_engine`) and `prompts` (`read_prompts`).
"""
