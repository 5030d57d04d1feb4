"""The plan of a server: what fits a GPU by each cache scheme, and what a search for it would take.

Other packages use `plan_options` (`PlanOptions`), `capacity_plan` (`make_plan`, `CapacityPlan`), `plan_text`
(`capacity_lines`) and `plan_page` (`capacity_page`). No weights are loaded.
"""
