"""Will it fit: the memory arithmetic, and a Plan that says why."""
