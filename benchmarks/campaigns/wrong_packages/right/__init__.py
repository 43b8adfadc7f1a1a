"""Right packages of kinds for which ``new-plugin`` has no template: the folders are installed."""
