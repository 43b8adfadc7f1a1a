"""Values the runtime derives from a config: parallel sizes, stages, head sizes. No torch."""
