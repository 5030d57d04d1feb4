"""The local engine behind OpenAI's completions and chat, for `kvtuner serve-local`. Needs the extra `serve`.

Other packages use `server_app` (`make_app`) and `chat_prompt` (`chat_tokens`).
"""
