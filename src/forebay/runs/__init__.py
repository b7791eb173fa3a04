"""The runs on a machine: the folder of each run, its record and events, and the processes it owns.

run_record       the folder of a run and run.json in it
earlier_runs     ended runs that are kept, and how many
event_tail       events as they are written
start_times      how long the stages of earlier starts took
owned_processes  which processes belong to a run

Standard library only: the supervisor also runs on hosts that have nothing but a Python.
"""
