"""Terminal output and options that several commands share."""
