"""Records and protocols shared by all packages. Torch appears in annotations only."""
