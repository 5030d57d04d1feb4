"""Which model a profile is for, and what it is compared with."""
