"""The database of the tests of workers."""

from databases.postgresql import postgresql

__all__ = ["postgresql"]
