"""What a run writes while it runs: metrics, log, progress. Import has no side effects."""
