"""For all tests: Ctrl-C means Ctrl-C, also when the test run was started in the background."""

import signal

# A shell starts background jobs with SIGINT ignored, and children inherit that: the commands under test would never see
# theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)
