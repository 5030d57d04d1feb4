"""The parts of the benchmark of attention on a processor, `cpu_attention.py`."""
