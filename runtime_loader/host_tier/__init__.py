"""Tiers below the device: pages of packed rows in host memory, and as they are stored. Knows nothing of servers.

`sglang`, `kernels` and `attention_backends` use `pages` (`HostPages`, `PageLayout`), `transfer` (`PageMover`,
`TorchMover`, `DeviceSide`) and `stored_page` (`seal`, `fault_of`).
"""
