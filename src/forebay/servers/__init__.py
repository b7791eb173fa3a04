"""Servers seen from outside, one module each: embedded, SGLang, vLLM.

base             StartRequest in, Launch out; readings of an answer; the ``Server`` protocol
embedded_server, sglang_server, vllm_server, unknown_server
                 each server's command line, endpoints, process roles and counters
registry         from a name, a command line or an answer to the ``Server``
install          where a server is installed and which version, without importing it
launch_flags     parts of command lines that the servers share
argv_flags       read flags out of an argv
process_roles    roles of processes by their titles
openai_api       requests and answers of the OpenAI API
http_client      addresses, and a request whose failures are values
prometheus       the text of /metrics as samples
log_patterns     log lines to stages and settings
"""
