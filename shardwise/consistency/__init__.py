"""What ranks agree on, and what each of them knows when one fails: the store of the job, agreement, liveness, records."""
