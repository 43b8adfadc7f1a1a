"""What allocates memory, and what an allocator reserves for it."""
