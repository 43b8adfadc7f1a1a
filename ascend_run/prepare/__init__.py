"""From a command line and a file to a run that can start, or one error. No torch."""
