"""Tiers below the device: pages of packed rows in host memory, and as they are stored. Knows nothing of servers."""
