"""The settings that `auto` leaves to a measurement: tokens of the exact window, scale words and their groups."""
