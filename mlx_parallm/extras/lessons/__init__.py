"""Lessons: prompts and a rule for the reward that a client gives while the server runs.

cards      what a client asks for, and what a lesson has taught
rules      what scores the answers of a rule, and the tasks of a lesson
examples   what is imitated first, if hardly any answer earns a reward
progress   what a lesson has taught so far, and when it ends
record     the last lesson of a run, in a file of the run's folder
"""
