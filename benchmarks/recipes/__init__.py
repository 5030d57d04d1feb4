"""Other projects' recipes for a KV cache, simulated from their papers and their published code.

Only what is stored is simulated, in float32: neither their kernels nor their speed. `recipe_list` has them all.
"""
