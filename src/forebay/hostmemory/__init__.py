"""How much host memory a new process can have. One formula, used by the planner, the preflight checks and the engine.

available   ``AvailableMemory``: MemAvailable, and the control group that leaves the least room
cgroups     the memory control groups of a process (versions 1 and 2), and how much each still allows
shm         the free space of /dev/shm
"""
