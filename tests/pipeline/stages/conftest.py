"""The database of the tests of workers."""

from postgresql import postgresql

__all__ = ["postgresql"]
