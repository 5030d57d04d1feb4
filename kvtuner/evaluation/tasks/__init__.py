"""What a model is asked: questions with one right answer, and the tasks of lm-evaluation-harness."""
