"""Which plugins exist, which may run together, and why."""
