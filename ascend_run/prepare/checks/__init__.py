"""Check that a config, its layout and its plugins can run together; each problem is a message."""
