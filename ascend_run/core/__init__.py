"""The runtime: config, model build, training loop, checkpoints, data, log. Knows no feature."""
