"""The doctor: from logs and the machine's records to the cause, its evidence and a fix with numbers.

    read_log.py           a file -> the lines worth keeping (streamed, bounded)
    unwrap_pasted.py      undo quoting, indentation and cut lines of a paste
    transcript.py         all sources together: reports of errors, stages, settings
    lifecycle.py          did it come up, was it stopped, did it fail; which errors can be the cause
    facts.py              versions, flags, ranks; memory and GPUs of the machine
    patterns.py, event_patterns/*.toml   wordings of events, as data
    activities.py, frame_activities.toml what a process was doing, by the frames of its traceback
    evidence_base.py      all of that in one place, with the events found
    rule.py, rules/       causes as conditions over events and facts, as data, by subject
    candidates.py         rules -> possible causes
    system_evidence.py    kernel records, exit codes, process states -> possible causes
    silent_ends.py, stalls.py, endings.py   logs whose end names nothing
    ranking.py            which of several causes is the cause, and why the next one is not
    fixes.py              the arithmetic of fixes
    diagnose.py           diagnose(sources, observations, machine) -> Diagnosis
    run_folder.py         a run's folder, or files, to the arguments of diagnose
    records.py            Observations in, Diagnosis out

A cause needs a failure in the log: an error that the server survived is none. Among errors the first specific one of
the first failing rank counts, deepest process first; what only says that something else failed comes last.
"""

from forebay.operation.doctor.diagnose import diagnose
from forebay.operation.doctor.read_log import SourceLog, read_file, read_text
from forebay.operation.doctor.records import Diagnosis, Evidence, Observations, RuledOut

__all__ = ["Diagnosis", "Evidence", "Observations", "RuledOut", "SourceLog", "diagnose", "read_file", "read_text"]
