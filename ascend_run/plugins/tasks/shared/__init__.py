"""What several tasks share: their samples, their losses and what is alike in tasks of pairs.

No plugin: a module here may be imported by every task, and imports none of them.
"""
