"""Servers under load: loads, requests, figures, and gates that figures can be real. Knows nothing of pages or flags.

Other packages use `runner` (`BenchWork`, `run_loads`, `replay`), `server` (`ServerFlags`, `run_server`), `client`
(`serving_client`), `load_target` (`LoadTarget`, `ServerRecord`), `loads` (`LoadOptions`), `load_metrics` (`SchemeRun`),
`gates`, `hardware` and `ablation`. `kvtuner.report.bench_report` writes the report.
"""
