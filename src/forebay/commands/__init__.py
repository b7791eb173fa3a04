"""What each command does, between the command line and the rooms that do it.

A request is a plain record, the result too: the command line runs a request in its own process for this machine, or
sends it to the helper on another host, where the same code runs it.

requests    the requests, one record per command
handlers    run one request on the machine of this process
planner     the planner in the form that ``up`` needs
host_main   the helper's main program: a request comes in on stdin, events and the result go out on stdout
relay       TCP connections of the user's machine to ports of the host, over the helper's stdin and stdout
log_chunks  a run's log in pieces
"""
