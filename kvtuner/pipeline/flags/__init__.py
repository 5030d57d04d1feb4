"""Options as fields of dataclasses, of which commands make flags and functions parameters, and the readers of texts.

Other packages use `option_fields` (`options_from`, `flag_fields`) and `number_readers`.
"""
