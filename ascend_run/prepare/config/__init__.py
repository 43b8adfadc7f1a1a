"""From files and command lines to the typed config of a run."""
