"""From files and command lines to the frozen config of a run. Torch-free."""
