"""What a run writes of itself while it runs: metrics, log, progress. Importing it does nothing."""
