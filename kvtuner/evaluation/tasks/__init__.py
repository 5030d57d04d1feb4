"""Tasks: likelihood, questions with one right answer, and lm-evaluation-harness. Each makes cells of any `Backend`.

The pipeline uses `likelihood` (`local_likelihood_cells`, `server_likelihood_cells`), `question_sets`
(`draw_question_sets`, `question_cells`), `harness_tasks` (`task_cells`) and `harness_model`; the rest is private.
The modules of the harness need the extra `eval`: import them only for its tasks.
"""
