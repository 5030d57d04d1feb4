"""Results for a person: text, tables, pictures and pages. Measures nothing.

Public functions, by module:

- `search_report`: `write_search_report`, `terminal_table`, `summary_json`; their data is `search_data.ReportData`,
  which `search_rows` makes of measurements.
- `evaluation_report`: `evaluation_lines`, `evaluation_page`, `sample_lines`.
- `bench_report`: `write_bench_report`, `summary_lines`; `bench_result`: `BenchResult`.
- `profile_report`: `describe`, `summary`, `profile_page`, `strip_html`; `layer_strip`: `profile_strip`, `Terminal`.
- `profile_difference`: `difference_of`, `difference_lines`, `difference_page`.
- `table`: `Table` of all of them, `record_table` for notebooks; `formatting`; `html_page.render` fills ``templates/``.
"""
