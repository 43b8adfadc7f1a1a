"""What a run is expected to cost: by formula, without torch and without allocating anything."""
