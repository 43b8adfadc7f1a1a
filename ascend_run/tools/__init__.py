"""Commands other than train, one folder each; a command is optional and listed in setup.cfg."""
