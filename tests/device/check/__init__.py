"""`make device-check`: one table that says what hpfunc does on the device of this machine.

    python -m tests.device.check                        # all rows: on a GPU, or where there is none on the simulation
    python -m tests.device.check --rows i,iii --json found.json
    python -m tests.device.check --plant                # with a fault in each row: each must say "wrong"

Each row is a process of its own with a limit of time (`runner`), so that a hang or a crash is a line of the table.
`rows` lists them; the other modules compute them, by programs that ranks run (`tests.device.harness`).
"""
