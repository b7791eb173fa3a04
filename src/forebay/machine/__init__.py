"""What a machine has: memory, accelerators, processes, ports, files, behind one interface.

interface       the ``Machine`` protocol and the records it returns
local, recorded two machines: this one, and a recorded folder
memory          MemAvailable, control groups, /dev/shm, locked memory, NUMA, swap
processes       identity (pid + start time + boot id), trees, sessions, CPU, memory, io
ports           listeners and their owners; bound but not listening
shm             files in /dev/shm and their mappers
accelerators    GPUs (``nvml`` reads them)
kernel_log      dmesg, where readable
facts           what a plan needs of a machine, as one JSON file
"""
