"""Other machines, reached over SSH and into containers, from the side of the user.

destination     what ``--on`` names: hosts, groups of hosts.toml, containers on them
hosts_file      hosts.toml
ssh_client      the user's own OpenSSH client: one shared connection per host, failures in one line
transport       from a destination to a command line that runs a POSIX shell there
shell_session   one shell kept open there: a batch of reads is one round trip
shell_scripts   reads as POSIX shell, and their answers
remote_machine  the ``Machine`` protocol over a shell session
agent_bundle    the operator as one file of Python, to be sent to a host
agent_session   the operator running on the host: a request in, events out
agent_client    requests that survive the loss of the connection
port_forward    a port of the host as a local port
log_stream      a growing log, each byte once
model_mirror    the metadata of a model's folder on the host, for the planner
"""
