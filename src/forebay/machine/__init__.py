"""What a machine has: memory, accelerators, processes, ports, files, behind one small interface."""
