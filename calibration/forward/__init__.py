"""Running a model layer by layer, exactly or as if its cache were quantized. Knows nothing of data or of candidates.

Other packages use `chain` (`DecoderChain`), `simulator` (`LayerSpec`, `Simulator`) and `read_plan`
(`ReadPlan`). The rest is private to `calibration`.
"""
