"""The local engine at work for commands: its flags, its model and profile, prompts and answers in order, its server.

Other packages use `engine_flags` (`GenerateFlags`, `ServeFlags`), `opened_engine` (`open_engine`), `prompts`
(`read_prompts`) and `served_engine` (`serve_engine`).
"""
