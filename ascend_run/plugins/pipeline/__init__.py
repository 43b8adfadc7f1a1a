"""Assignment of layers to pipeline stages."""
