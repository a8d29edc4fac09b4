"""What this installation and this job can do, and what to change.

`survey` finds `Facts`, `examine` makes rows with verdicts of them, `doctor` is what users call. Only `survey` and
`doctor` look at the machine or communicate; all verdicts are functions of plain values.
"""
