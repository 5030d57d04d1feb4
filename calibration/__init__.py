"""Measures how much each layer's keys and values suffer from quantization. Knows nothing of budgets or search.

Other packages use `workbench` (`Workbench`, `CalibrationOptions`, `measure_table`), `sensitivity` (`SensitivityTable`,
`Candidate`), `model_loading`, `corpus`, `batches`, `forward.simulator` (`Simulator`, `LayerSpec`) and `kl`.
"""
