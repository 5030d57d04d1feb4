"""KL of whole forward passes with one side of one layer quantized: for which candidates, how far, and what follows."""
