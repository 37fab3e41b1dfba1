"""`reproduce.py`: suites of trainings and evaluations, and a page of each suite's numbers."""
