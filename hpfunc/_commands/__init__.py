"""What ``python -m hpfunc`` runs beside the doctor. Only the command line imports it."""
