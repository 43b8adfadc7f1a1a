"""Pure tensor code that several plugins share; imports torch only."""
