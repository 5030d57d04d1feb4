"""What is done with files of profiles: listing those at hand, publishing them, and importing those of other tools."""
