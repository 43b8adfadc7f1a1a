"""Tasks of lm-evaluation-harness (EleutherAI's ``lm_eval``), answered by a stored model.

What is here imports ``lm_eval`` where it is used: it is no dependency.
"""
