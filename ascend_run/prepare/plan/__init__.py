"""The plan of a run: its records, how they are built, and their JSON values. No torch."""
