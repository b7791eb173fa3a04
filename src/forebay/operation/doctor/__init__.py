"""The doctor: from logs and the machine's records to the cause, its evidence and a fix with numbers.

    reading.py       a file -> the lines worth thinking about (streamed, bounded)
    transcript.py    all sources together: blocks of errors, stages, settings
    life.py          came up? stopped? failed? which errors can be the cause?
    rule.py, rules/  the knowledge, as data, by subject
    fixes.py         the arithmetic of fixes
    machine_side.py  kernel records, exit codes, process states
    choose.py        diagnose(sources, observations) -> Diagnosis
    run_folder.py    a run's folder, or files, to the two of them
    records.py       Observations in, Diagnosis out

A cause needs a failure in the log: an error that the server survived is none. Among errors the first specific one of
the first failing rank counts, deepest process first; what only says that something else failed comes last.
"""

from forebay.operation.doctor.choose import diagnose
from forebay.operation.doctor.reading import SourceLog, read_file, read_text
from forebay.operation.doctor.records import Diagnosis, Evidence, Observations, RuledOut

__all__ = ["Diagnosis", "Evidence", "Observations", "RuledOut", "SourceLog", "diagnose", "read_file", "read_text"]
