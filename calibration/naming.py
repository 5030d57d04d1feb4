"""What may be written into a profile instead of a path of this machine."""

from kvtuner.exported_configs.identity import public_name

__all__ = ["public_name"]
